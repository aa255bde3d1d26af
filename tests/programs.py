"""Random programs, meshes and specs: the space over which `pjit(f) == f` is tested.

A program is Python source, so a failure shrinks to something a person can read and run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

Shape = tuple[int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Value:
    """A variable of the program under construction."""

    name: str
    shape: Shape


@dataclass
class Program:
    """Source of `f`, the shapes of its inputs, and how it is differentiated: 0, 1 or 2 times."""

    source: str
    inputs: list[Shape]
    order: int
    mesh: dict[str, int]
    specs: list[str]

    def function(self) -> Callable[..., Any]:
        """The plain function. With order >= 1 it returns gradients with respect to all inputs."""
        space: dict[str, Any] = {"torch": torch, "scan": _scan}
        exec(compile(self.source, "<program>", "exec"), space)
        f = space["f"]
        args = tuple(range(len(self.inputs)))
        for _ in range(self.order):
            f = _gradient(f, args)
        return f  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"\nmesh {self.mesh}, specs {self.specs}, inputs {self.inputs}, grad order {self.order}\n{self.source}"


def _scan(*args: Any) -> Any:
    import vescale_fn as vf

    return vf.scan(*args)


def _gradient(f: Callable[..., Any], args: tuple[int, ...]) -> Callable[..., Any]:
    def scalar(*xs: torch.Tensor) -> torch.Tensor:
        out = f(*xs)
        outs = out if isinstance(out, tuple) else (out,)
        total = torch.zeros((), dtype=torch.float64)
        for i, o in enumerate(outs):
            total = total + (torch.sin(o) * (1 + 0.1 * i)).sum()
        return total

    return torch.func.grad(scalar, argnums=args)


# ---- operations: (name, applies(shape), text, result shape)


def _broadcastable(a: Shape, b: Shape) -> Shape | None:
    try:
        return tuple(torch.broadcast_shapes(a, b))
    except RuntimeError:
        return None


UNARY = ["torch.sin({x})", "torch.tanh({x})", "-{x}", "{x} * 0.5", "{x} + 1.5", "torch.relu({x})", "{x}.exp() * 0.1",
         "{x} * {x}", "torch.sigmoid({x})", "{x}.clamp(-1, 1)", "{x}.clone()"]  # fmt: skip
BINARY = ["{x} + {y}", "{x} - {y}", "{x} * {y}", "torch.maximum({x}, {y})", "{x} / ({y} * {y} + 1)",
          "torch.where({x} > {y}, {x}, {y} * 2)"]  # fmt: skip
OVER_DIM = [
    ("torch.softmax({x}, {d})", "same"),
    ("torch.log_softmax({x}, {d})", "same"),
    ("torch.cumsum({x}, {d})", "same"),
    ("torch.flip({x}, [{d}])", "same"),
    ("torch.roll({x}, 1, {d})", "same"),
    ("{x}.sum({d})", "drop"),
    ("{x}.sum({d}, keepdim=True)", "keep"),
    ("{x}.mean({d})", "drop"),
    ("{x}.amax({d})", "drop"),
    ("{x}.logsumexp({d})", "drop"),
    ("{x}.select({d}, -1)", "drop"),
    ("torch.sort({x}, {d}).values", "same"),
    ("torch.cat([{x}, {x} * 2], {d})", "double"),
    ("{x}.unsqueeze({d})", "insert"),
    ("{x}.narrow({d}, 0, {half})", "half"),
    ("torch.stack([{x}, torch.sin({x})], {d})", "stack"),
]


class Builder:
    """Grows a program one statement at a time."""

    def __init__(self, draw: Draw, inputs: list[Shape]) -> None:
        self.draw = draw
        self.values = [Value(f"x{i}", s) for i, s in enumerate(inputs)]
        self.lines: list[str] = []

    def pick(self) -> Value:
        return self.draw(st.sampled_from(self.values))  # type: ignore[no-any-return]

    def add(self, text: str, shape: Shape) -> None:
        if math.prod(shape) > 256 or len(shape) > 4:
            return
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.values.append(Value(name, shape))

    def statement(self) -> None:
        kind = self.draw(
            st.sampled_from(["unary", "binary", "dim", "dim", "matmul", "reshape", "permute", "sum", "scan"])
        )
        getattr(self, f"_{kind}")()

    def _unary(self) -> None:
        x = self.pick()
        self.add(self.draw(st.sampled_from(UNARY)).format(x=x.name), x.shape)

    def _binary(self) -> None:
        x, y = self.pick(), self.pick()
        shape = _broadcastable(x.shape, y.shape)
        if shape is not None:
            self.add(self.draw(st.sampled_from(BINARY)).format(x=x.name, y=y.name), shape)

    def _dim(self) -> None:
        x = self.pick()
        if not x.shape:
            return
        text, effect = self.draw(st.sampled_from(OVER_DIM))
        d = self.draw(st.integers(0, len(x.shape) - 1))
        n = x.shape[d]
        if n == 0:
            return
        shape: Shape = {
            "same": x.shape,
            "drop": x.shape[:d] + x.shape[d + 1 :],
            "keep": (*x.shape[:d], 1, *x.shape[d + 1 :]),
            "double": (*x.shape[:d], 2 * n, *x.shape[d + 1 :]),
            "insert": (*x.shape[:d], 1, *x.shape[d:]),
            "half": (*x.shape[:d], (n + 1) // 2, *x.shape[d + 1 :]),
            "stack": (*x.shape[:d], 2, *x.shape[d:]),
        }[effect]
        self.add(text.format(x=x.name, d=d, half=(n + 1) // 2), shape)

    def _matmul(self) -> None:
        x, y = self.pick(), self.pick()
        if len(x.shape) >= 2 and len(y.shape) == 2 and x.shape[-1] == y.shape[0]:
            self.add(f"{x.name} @ {y.name}", (*x.shape[:-1], y.shape[1]))
        elif len(x.shape) == 2 and len(y.shape) == 2 and x.shape[0] == y.shape[0]:
            self.add(f"torch.einsum('ab,ac->bc', {x.name}, {y.name})", (x.shape[1], y.shape[1]))

    def _reshape(self) -> None:
        x = self.pick()
        options: list[Shape] = [(math.prod(x.shape),)]
        for d, n in enumerate(x.shape):
            if d + 1 < len(x.shape):
                options.append((*x.shape[:d], n * x.shape[d + 1], *x.shape[d + 2 :]))
            options += [(*x.shape[:d], a, n // a, *x.shape[d + 1 :]) for a in (2, 3) if n % a == 0 and n > a]
        shape = self.draw(st.sampled_from(options))
        self.add(f"{x.name}.reshape({', '.join(map(str, shape))})", shape)

    def _permute(self) -> None:
        x = self.pick()
        if len(x.shape) > 1:
            order = self.draw(st.permutations(range(len(x.shape))))
            self.add(f"{x.name}.permute({', '.join(map(str, order))})", tuple(x.shape[i] for i in order))

    def _sum(self) -> None:
        x = self.pick()
        self.add(f"{x.name}.sum()", ())

    def _scan(self) -> None:
        x = self.pick()
        if x.shape and x.shape[0] > 0:
            body = "lambda c, s: (torch.tanh(c + s) * 0.9, c * s)"
            name = f"v{len(self.lines)}"
            self.lines.append(f"{name}, {name}s = scan({body}, torch.zeros_like({x.name}[0]), {x.name})")
            self.values += [Value(name, x.shape[1:]), Value(f"{name}s", x.shape)]


def spec_for(draw: Draw, shape: Shape, mesh: dict[str, int], *, partial: bool = True) -> str:
    """A random legal spec: plain, tuple axes, factor sharding, uneven, partial."""
    free = draw(st.permutations(list(mesh)))
    dims = []
    for d, n in enumerate(shape):
        take = draw(st.integers(0, min(2, len(free))))
        axes, free = free[:take], free[take:]
        ranks = math.prod(mesh[a] for a in axes)
        name = "abcdefg"[d]
        text = axes[0] if len(axes) == 1 else f"({' '.join(axes)})"
        if not axes:
            dims.append(name)
        elif n % ranks == 0:
            factors = [f for f in (2, 3) if n % (f * ranks) == 0 and n > f]
            if factors and draw(st.booleans()):
                dims.append(f"({name}={factors[0]} {name}1/{text})")
            else:
                dims.append(f"{name}/{text}")
        else:
            dims.append(f"{name}~/{text}")
    state = ""
    if partial and free and draw(st.integers(0, 3)) == 0:
        state = f" {{sum: {free[0]}}}"
    return " ".join(dims) + state


@st.composite
def programs(draw: Draw, order: int = 0, most: int = 8) -> Program:
    """A program of up to `most` statements on a mesh of up to 3 axes of size 1-3."""
    axes = draw(st.integers(1, 3))
    mesh = {a: draw(st.integers(1, 3)) for a in ("x", "y", "z")[:axes]}
    dim = st.sampled_from([1, 2, 3, 4, 6, 6, 12] if order == 0 else [1, 2, 3, 4, 6])
    shapes = draw(st.lists(st.lists(dim, min_size=0, max_size=3).map(tuple), min_size=1, max_size=3))
    shapes = [s if math.prod(s) <= 256 else s[:2] for s in shapes]
    build = Builder(draw, shapes)
    for _ in range(draw(st.integers(1, most))):
        build.statement()
    outs = [v.name for v in build.values[len(shapes) :]][-3:] or ["x0"]
    body = "\n".join(f"    {line}" for line in build.lines)
    params = ", ".join(f"x{i}" for i in range(len(shapes)))
    source = f"def f({params}):\n{body}\n    return ({', '.join(outs)},)\n"
    return Program(source, shapes, order, mesh, [spec_for(draw, s, mesh) for s in shapes])
