"""A random program: Python source, inputs, mesh, specs, and how pjit is asked to run it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from einops import rearrange

import vescale_fn as vf

NAMES: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "vf": vf, "rearrange": rearrange}


@dataclass(frozen=True)
class Input:
    """A tensor: kind f (of the program's dtype), i (integers from `low` to below `high`), b (whether such are positive,
    if `low` is given), c.

    form: "unit" (within 0 and 1), "ordered" (rising along the last dim), "permuted" (integers that order dim 0), "bags"
        (0, 1, ... up to 3).
    """

    kind: str
    shape: tuple[int, ...]
    high: int = 4
    low: int = 0
    form: str = ""

    def make(self, seed: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.form == "bags":
            return torch.arange(self.shape[0]).clamp(max=3)
        if self.form in ("unit", "permuted"):
            x = torch.rand(self.shape, dtype=torch.float64, generator=generator)
            return x.to(dtype) if self.form == "unit" else x.argsort(0)
        if self.kind == "i" or (self.kind == "b" and self.low):
            i = torch.randint(self.low, self.high, self.shape, generator=generator)
            return i if self.kind == "i" else i > 0
        x = torch.randn(self.shape, dtype=torch.complex128 if self.kind == "c" else torch.float64, generator=generator)
        x = x.sort().values if self.form == "ordered" else x
        return x > 0 if self.kind == "b" else x if self.kind == "c" else x.to(dtype)


@dataclass(frozen=True)
class Program:
    """`repr` is a script that builds the same program and checks it; run it in the folder of the tests.

    lines: of `f(x0, x1, ...)`, which returns the tuple `returns` of names.
    parameters: the arguments of the step as expressions of x0, x1, ...; `result`: its result as one of y0, y1, ...,
        which are what f returns, or its gradients with respect to the float inputs when `order` is 1 or 2.
    specs: of the inputs; `outs`: of the results, None where nothing is asked.
    in_shardings: plain tensors are given, and their specs to pjit.
    feed: the step runs twice, y0 of the first call being x0 of the second.
    options: of pjit, other than these. wild: numbers may be large, infinite or none.
    """

    lines: Sequence[str]
    returns: Sequence[str]
    inputs: Sequence[Input]
    specs: Sequence[str]
    mesh: Mapping[str, int]
    parameters: Sequence[str]
    result: str
    order: int = 0
    dtype: str = "float64"
    outs: Sequence[str | None] = ()
    in_shardings: bool = False
    donate: Sequence[int] = field(default=())
    feed: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    wild: bool = False

    @property
    def source(self) -> str:
        """The text of `f`, and of the step that calls it."""
        xs = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = "".join(f"    {line}\n" for line in self.lines)
        f = f"def f({xs}):\n{body}    return ({', '.join(self.returns)},)\n"
        ps = ", ".join(f"p{i}" for i in range(len(self.parameters)))
        floats = tuple(i for i, x in enumerate(self.inputs) if x.kind == "f")
        run = f"gradients(f, {floats}, {self.order})" if self.order else "f"
        unpack = "".join(
            f"    {name} = p{i}{path}\n" for i, p in enumerate(self.parameters) for name, path in paths(self.tree(p))
        )
        ys = ", ".join(f"y{i}" for i in range(len(self.outs)))
        return f"{f}\ndef step({ps}):\n{unpack}    {ys}, = {run}({xs})\n    return {self.result}\n"

    def donating(self, parameters: Iterable[int]) -> Program:
        """The same, but with these parameters donated."""
        return replace(self, donate=list(parameters))

    def step(self) -> Callable[..., Any]:
        space = {**NAMES, "gradients": gradients}
        exec(compile(self.source, "<program>", "exec"), space)
        return space["step"]  # type: ignore[no-any-return]

    @staticmethod
    def tree(text: str) -> Any:
        """An expression of leaves as a tree of their names."""
        return eval(text, {}, _Leaves())

    def values(self) -> list[torch.Tensor]:
        """The inputs' values, the same every time."""
        dtype = getattr(torch, self.dtype)
        return [x.make(i, dtype) for i, x in enumerate(self.inputs)]

    def arguments(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The step's arguments with these leaves as x0, x1, ..."""
        names = {f"x{i}": leaf for i, leaf in enumerate(leaves)}
        return tuple(eval(p, {}, names) for p in self.parameters)

    def results(self, leaves: Sequence[Any]) -> Any:
        """The step's result with these leaves as y0, y1, ..."""
        return eval(self.result, {}, {f"y{i}": leaf for i, leaf in enumerate(leaves)})

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        shown = ",\n    ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        note = "\n".join(f"# {line}" for line in self.source.splitlines())
        return f"\nfrom programs import Input, Program, check\n\n{note}\ncheck(Program(\n    {shown},\n))\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints what fails."""
        printer.text(repr(self))


def _shown(value: Any) -> str:
    lines = isinstance(value, (list, tuple)) and len(value) > 1
    return "[\n        " + ",\n        ".join(map(repr, value)) + ",\n    ]" if lines else repr(value)


class _Leaves(dict[str, str]):
    """Names that stand for themselves."""

    def __missing__(self, name: str) -> str:
        return name


def paths(tree: Any, at: str = "") -> list[tuple[str, str]]:
    """(leaf, how to reach it) for each leaf of a tree of names.

    >>> paths({"a": ["x0", None]})
    [('x0', "['a'][0]")]
    """
    if isinstance(tree, str):
        return [(tree, at)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree or ())
    return [found for key, child in items for found in paths(child, f"{at}[{key!r}]")]


def gradients(f: Callable[..., Any], args: tuple[int, ...], order: int) -> Callable[..., Any]:
    """The gradients of f's results with respect to `args`, taken `order` times."""

    def scalar(*xs: torch.Tensor) -> torch.Tensor:
        outs = [o for o in f(*xs) if o.is_floating_point() or o.is_complex()]
        total: Any = torch.zeros((), dtype=xs[args[0]].dtype)
        for i, o in enumerate(outs):
            real = torch.view_as_real(o) if o.is_complex() else o
            total = total + (torch.sin(real) * (1 + 0.1 * i)).sum()
        return total

    grad = torch.func.grad(scalar, argnums=args)
    return grad if order == 1 else gradients(grad, args, order - 1)


def names_in(line: str) -> set[str]:
    """The variables that a line mentions."""
    return set(re.findall(r"\b[xv]\d+s?\b", line))
