"""Grows random programs. Statements run as they are added: what fails or explodes is left out, and what shapes and
dtypes come out is seen, not predicted."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from programs.ops import FAMILIES, Op
from programs.pattern import Draw, Pattern, Sizes, fits, kind_of
from programs.program import NAMES, Input, Program, names_in
from programs.specs import constraint_for, mesh_for, spec_for

MOST_INPUTS = 6
MOST_ELEMENTS = 512
LARGEST = 1e3


class _NotHere(Exception):
    """A statement that cannot be made with the values at hand."""


class _Holes(dict[str, Any]):
    """What fills the holes of a statement: operands by name, and what is drawn where it is named."""

    def __init__(self, draw: Draw, given: dict[str, Any], shape: tuple[int, ...], mesh: dict[str, int]) -> None:
        super().__init__(given)
        self.draw, self.shape, self.mesh = draw, shape, mesh

    def __missing__(self, name: str) -> Any:
        self[name] = value = self._drawn(name)
        return value

    def _drawn(self, name: str) -> Any:
        shape = self.shape
        if name == "s":
            return self.draw(st.integers(-2, 3))
        if name == "bool":
            return self.draw(st.booleans())
        if name == "spec":
            return spec_for(self.draw, shape, self.mesh, ("sum", "ct"))
        if name == "shape":
            return ", ".join(map(str, self.draw(st.sampled_from(_reshapes(shape)))))
        if name == "order":
            return ", ".join(map(str, self.draw(st.permutations(range(len(shape))))))
        if name in ("d", "e"):
            free = [d for d in range(len(shape)) if name == "d" or d != self["d"]]
            return self._one_of(free)
        n = shape[0 if name == "j0" else self["d"]] if shape else 0
        return self._one_of(list(range(1, n + 1) if name == "k" else range(n)))

    def _one_of(self, options: list[int]) -> int:
        if not options:
            raise _NotHere
        return self.draw(st.sampled_from(options))  # type: ignore[no-any-return]


def _reshapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Everything in one dim, two neighbours merged, one dim split."""
    options = [(math.prod(shape),)]
    for d, n in enumerate(shape):
        if d + 1 < len(shape):
            options.append((*shape[:d], n * shape[d + 1], *shape[d + 2 :]))
        options += [(*shape[:d], a, n // a, *shape[d + 1 :]) for a in (2, 3) if n % a == 0 and n > a]
    return options


@dataclass
class Builder:
    """A program in the making."""

    draw: Draw
    mesh: dict[str, int]
    dtype: str
    inputs: list[Input] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    made: list[set[str]] = field(default_factory=list)  # by each line

    def input(self, kind: str, shape: tuple[int, ...], high: int = 4) -> str:
        if math.prod(shape) > MOST_ELEMENTS or high < 1:
            raise _NotHere
        name = f"x{len(self.inputs)}"
        self.inputs.append(Input(kind, shape, high))
        self.values[name] = self.inputs[-1].make(len(self.inputs) - 1, getattr(torch, self.dtype))
        return name

    def statement(self) -> None:
        """Add a statement, or nothing."""
        kept = len(self.inputs)
        op = self.draw(st.sampled_from(FAMILIES[self.draw(st.sampled_from(list(FAMILIES)))]))
        try:
            line = self._text(op)
            made = self._run(line)
        except (_NotHere, RuntimeError, IndexError, ValueError, TypeError, AssertionError, NotImplementedError):
            for i in range(kept, len(self.inputs)):
                del self.values[f"x{i}"]
            del self.inputs[kept:]
            return
        self._add(line, made)
        last = next(iter(made))
        if made[last].is_floating_point() and self.draw(st.integers(0, 5)) == 0:
            name = f"v{len(self.lines)}"
            self._add(f"{name} = {self._constrained(last, 0)}", {name: made[last]})

    def _add(self, line: str, made: dict[str, torch.Tensor]) -> None:
        self.lines.append(line)
        self.made.append(set(made))
        self.values |= made

    def _text(self, op: Op) -> str:
        sizes, names = Sizes(), {}
        for name, text in op.operands.items():
            names[name], sizes = self._operand(Pattern.of(text), sizes)
        result = f"v{len(self.lines)}"
        first = self.values[next(iter(names.values()))]
        given = {k: self._constrained(name) for k, name in names.items()} | {"n": sizes.letters, "v": result}
        text = op.text.format_map(_Holes(self.draw, given, tuple(first.shape), self.mesh))
        return text if "{v}" in op.text else f"{result} = {text}"

    def _constrained(self, name: str, seldom: int = 5) -> str:
        """The value itself, or the value in a layout of its own."""
        if self.draw(st.integers(0, seldom)):
            return name
        return f"vf.reshard({name}, {constraint_for(self.draw, self.values[name], self.mesh)!r})"

    def _operand(self, pattern: Pattern, sizes: Sizes) -> tuple[str, Sizes]:
        """A value that the pattern fits, or a new input; and what the pattern's letters are then."""
        dtype = getattr(torch, self.dtype)
        at_hand = [name for name, value in self.values.items() if fits(value, pattern, sizes, dtype)]
        if at_hand and (len(self.inputs) >= MOST_INPUTS or self.draw(st.integers(0, 4))):
            name = self.draw(st.sampled_from(at_hand[::-1]))
        elif len(self.inputs) < MOST_INPUTS:
            shape = sizes.fill(pattern.dims, self.draw)
            name = self.input(pattern.kind, shape, sizes.letters[pattern.below] if pattern.below else 4)
        else:
            raise _NotHere
        found = sizes.match(pattern.dims, tuple(self.values[name].shape))
        assert found is not None
        return name, found

    def _run(self, line: str) -> dict[str, torch.Tensor]:
        """The values that a statement makes."""
        space = {**NAMES, **self.values}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(line, space)
        made = {n: v for n, v in space.items() if n not in self.values and n in names_in(n)}
        dtype = getattr(torch, self.dtype)
        if not all(isinstance(v, torch.Tensor) and _is_tame(v) and kind_of(v, dtype) for v in made.values()):
            raise _NotHere
        return made

    def returns(self) -> list[str]:
        """What no later statement reads, and now and then something that is read too."""
        used = {n for line, made in zip(self.lines, self.made) for n in names_in(line) - made}
        leaves = [n for made in self.made for n in sorted(made) if n not in used]
        extra = [self.draw(st.sampled_from([*self.values]))] if self.draw(st.integers(0, 3)) == 0 else []
        return list(dict.fromkeys([*leaves, *extra])) or ["x0"]


def _is_tame(x: torch.Tensor) -> bool:
    """Small, without infinities and large numbers."""
    if x.numel() > MOST_ELEMENTS or x.ndim > 5:
        return False
    return not x.numel() or x.dtype is torch.bool or bool((x.abs() <= LARGEST).all())


@st.composite
def programs(
    draw: Draw, order: int = 0, most: int = 6, dtype: str = "float64", mesh: dict[str, int] | None = None
) -> Program:
    """A program of up to `most` statements, differentiated `order` times, on a mesh that is drawn unless given."""
    build = Builder(draw, mesh or mesh_for(draw), dtype)
    build.input("f", tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 6]), max_size=3))))
    for _ in range(draw(st.integers(1, most))):
        build.statement()
    returns = build.returns()
    if order:
        results = [x.shape for x in build.inputs if x.kind == "f"]
        feed = draw(st.integers(0, 3)) == 0
    else:
        like = [n for n in returns if _alike(build.values[n], build.values["x0"])]
        feed = bool(like) and draw(st.integers(0, 3)) == 0
        if feed:
            returns = [like[0], *(n for n in returns if n != like[0])]
        results = [tuple(build.values[n].shape) for n in returns]
    parameters = _trees(draw, "x", len(build.inputs))
    in_shardings = draw(st.integers(0, 3)) == 0
    donate = [] if in_shardings else draw(st.lists(st.integers(0, len(parameters) - 1), unique=True))
    return Program(
        lines=build.lines,
        returns=returns,
        inputs=build.inputs,
        specs=[spec_for(draw, x.shape, build.mesh, () if x.kind == "b" else ("sum",)) for x in build.inputs],
        mesh=build.mesh,
        parameters=parameters,
        result=f"({', '.join(_trees(draw, 'y', len(results)))},)",
        order=order,
        dtype=dtype,
        outs=[spec_for(draw, s, build.mesh) if draw(st.integers(0, 4)) == 0 else None for s in results],
        in_shardings=in_shardings,
        donate=donate,
        feed=feed,
    )


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype)


def _trees(draw: Draw, letter: str, n: int) -> list[str]:
    """Trees of the leaves x0, x1, ... in order: single leaves, and dicts, tuples and lists of some."""
    trees, at = [], 0
    while at < n:
        take = draw(st.integers(1, n - at))
        names = [f"{letter}{i}" for i in range(at, at + take)]
        at += take
        first, rest = names[0], ", ".join(names[1:])
        one = [first, first, f"[{first}]", f"{{'w': {first}}}"]
        several = [f"[{', '.join(names)}]", f"({first}, None, [{rest}])", f"{{'b': {first}, 'a': ({rest},)}}"]
        trees.append(draw(st.sampled_from(several if rest else one)))
    return trees
