"""What workers of a pool run: regions at once and lowered, right and wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, hessian, jvp, vjp, vmap

import vescale_fn as vf
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tree import flatten


def body(x: Tensor, w: Tensor) -> Tensor:
    hidden = torch.tanh(vf.all_gather(x, "tp", dim=0, tiled=True) @ w)
    ring = vf.ppermute(hidden, "tp", shift=1)
    return vf.psum_scatter(ring * hidden, "tp", dim=0, tiled=True) + vf.axis_index("tp")


def results(process: int, processes: int, ranks: int) -> list[Any]:
    """Value and gradients of a body with collectives, at once and lowered, and each collective by itself."""
    mesh = vf.make_mesh(processes=processes, tp=ranks)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * ranks, 4, dtype=torch.float64, generator=generator)
    w = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    mapped = vf.shard_map(body, mesh=mesh, in_specs=("b/tp d", "d n"), out_specs="b/tp n")

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return mapped(x, w).sin().sum()

    def derivatives(x: Tensor, w: Tensor) -> Any:
        return mapped(x, w), *grad(loss, argnums=(0, 1))(x, w)

    lowered = [y.full() for y in vf.pjit(derivatives, mesh=mesh, deterministic=True)(x, w)]
    return [*derivatives(x, w), *lowered]


# ---- a sample of every group of behaviours, on a mesh of x=2 and y=2

Sample = Callable[[Mesh], tuple[Callable[..., Any], list[Tensor]]]  # mesh -> a function and its arguments


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def basics(mesh: Mesh) -> Any:
    """Tuple axes in both orders, a tree, a static argument, what is closed over, a region in another."""
    closed = draw(3, seed=2)

    def inner(t: Tensor) -> Tensor:
        return vf.psum(t * (1 + vf.axis_index("x")), "y")

    def outer(t: Tensor) -> Tensor:
        nested = vf.shard_map(inner, in_specs="a/y b", out_specs="a b", axis_names={"y"})
        return vf.psum(nested(t), "x")

    def body(tree: Any, scale: int) -> Any:
        return {"a": tree["a"] * scale, "b": tree["b"] + closed}

    mapped = vf.shard_map(
        body,
        mesh=mesh,
        in_specs=({"a": "a/(x y) b", "b": "a/(y x) b"}, None),
        out_specs={"a": "a/(y x) b", "b": "a/(x y) b"},
    )
    region = vf.shard_map(outer, mesh=mesh, in_specs="a/x b", out_specs="a b", axis_names={"x"})
    return lambda x: (mapped({"a": x, "b": x}, 3), region(x)), [draw(8, 3)]


def collectives(mesh: Mesh) -> Any:
    def all_of(t: Tensor, axes: Any) -> list[Tensor]:
        n = vf.axis_size(axes)
        counts = torch.arange(n) % 2 + 1
        starts = counts.cumsum(0) - counts
        me = vf.axis_index(axes)
        received = counts[me] * torch.ones(n, dtype=torch.int64)
        sizes = starts, counts, 2 * me * torch.ones(n, dtype=torch.int64), received
        return [
            *(f(t, axes) for f in (vf.psum, vf.pmean, vf.pmax, vf.pmin)),
            *(vf.all_gather(t, axes, tiled=True, to=to) for to in ("varying", "invarying", "reduced")),
            vf.psum_scatter(t, axes, tiled=True),
            vf.all_to_all(t, axes, 0, 1, tiled=True),
            vf.ppermute(t, axes, shift=1),
            vf.ppermute(t, axes, [(0, 1)]),
            vf.pbroadcast(t, axes, 1),
            t * vf.axis_index(axes),
            vf.ragged_all_to_all(t, torch.zeros(2 * n, 2, dtype=t.dtype), *sizes, axes),
        ]

    def body(t: Tensor) -> Any:
        found = [y for axes in ("x", "y", ("x", "y"), ("y", "x")) for y in all_of(t[0, 0], axes)]
        return [y[None, None] for y in found]

    return vf.shard_map(body, mesh=mesh, in_specs="i/x j/y ...", out_specs="i/x j/y ..."), [draw(2, 2, 8, 2)]


def states(mesh: Mesh) -> Any:
    """Parts of a sum through linear operations and edges, a reduced weight, sums over a loop."""

    def body(x: Tensor, w: Tensor) -> Any:
        parts = 2 * vf.pcast(x @ vf.pcast(w, "x", to="varying"), "x", to="unreduced")
        reduced = vf.pcast(w, "x", to="reduced")
        start = vf.pcast(torch.zeros_like(w), "x", to="unreduced")
        gradient = lambda row: grad(lambda w: (row @ w).sin().sum())(reduced)  # noqa: E731
        total = vf.scan(lambda c, row: (c + gradient(row), None), start, x)[0]
        return parts, vf.psum(total, "x")

    f = vf.shard_map(body, mesh=mesh, in_specs=("a/x k", "k b"), out_specs=("a b {sum: x}", "k b"), axis_names={"x"})
    return f, [draw(4, 3), draw(3, 2, seed=1)]


def derivatives(mesh: Mesh) -> Any:
    def layer(x: Tensor, w: Tensor) -> Tensor:
        y = (vf.all_gather(x, "y", 1, tiled=True) @ w).sin()
        return y / vf.pmean((y * y).sum() + 1, ("x", "y"))

    region = vf.shard_map(layer, mesh=mesh, in_specs=("a/x k/y", "k b/y"), out_specs="a/x b/y")
    x, w, ct = draw(4, 2), draw(2, 4, seed=1), draw(4, 4, seed=2)

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return region(x, w).exp().sum()

    def every(x: Tensor, w: Tensor) -> Any:
        return [
            jvp(region, (x, w), (x.cos(), w.sin())),
            vjp(region, x, w)[1](ct),
            grad(loss, (0, 1))(x, w),
            jvp(grad(loss, 1), (x, w), (x.cos(), w.sin())),
            hessian(loss, 1)(x, w),
            grad(vf.call(loss, remat=True), 1)(x, w),
        ]

    return every, [x, w]


def inside(mesh: Mesh) -> Any:
    """Gradients taken on each rank, types checked or not, of an argument and of what is closed over."""

    def body(d: Tensor, w: Tensor) -> Any:
        losses = [lambda w: (w * w * d).sum(), lambda w: vf.psum((w * w * d).sum(), ("x", "y"))]
        return [vf.pcast(grad(loss)(w)[None], ("x", "y"), to="varying") for loss in losses]

    def every(d: Tensor, w: Tensor) -> Any:
        options = [{"mesh": mesh, "out_specs": "r/(x y)", "check_vma": c} for c in (True, False)]
        return [
            (
                vf.shard_map(body, in_specs=("r/(x y)", ""), **o)(d, w),
                vf.shard_map(lambda d: body(d, w), in_specs="r/(x y)", **o)(d),
            )
            for o in options
        ]

    return every, [draw(4), draw()]


def mapped(mesh: Mesh) -> Any:
    """vmap, keys, writes in place, and a constraint on an axis of the solver."""

    def body(t: Tensor) -> Tensor:
        out = t.clone()
        out[0] += vf.psum(t, "x").sum()
        return out

    def draws(keys: Tensor) -> Tensor:
        with vf.random.scope(keys[0]):
            return torch.rand(1, 3)

    over_x = vf.shard_map(body, mesh=mesh, in_specs="a/x b", out_specs="a/x b", axis_names={"x"})
    keys = torch.stack([vf.random.key(i) for i in range(4)])
    drawn = vf.shard_map(draws, mesh=mesh, in_specs="n/(x y) two", out_specs="n/(x y) d")
    return lambda x, keys: [vmap(over_x, 1, 2)(x), over_x(vf.reshard(x[:, 0], "a b/y")), drawn(keys)], [
        draw(4, 3, 2),
        keys,
    ]


GROUPS: dict[str, Sample] = {f.__name__: f for f in (basics, collectives, states, derivatives, inside, mapped)}


def group(process: int, processes: int, name: str) -> list[Tensor]:
    """The results of a sample at once, then of its program."""
    mesh = vf.make_mesh(processes=processes, x=2, y=2)
    f, args = GROUPS[name](mesh)
    found = [*flatten(f(*args))[0], *flatten(vf.pjit(f, mesh=mesh, deterministic=True)(*args))[0]]
    return [y.full() if isinstance(y, vf.Array) else y for y in found]


def one_fewer(process: int, processes: int, lowered: bool) -> str:
    """A process that leaves out the last collective."""
    mesh = vf.make_mesh(dp=2)

    def wrong(x: Tensor) -> Tensor:
        first = vf.psum(x, "dp")
        return first if process == 1 else first + vf.pmax(x, "dp")

    f = vf.shard_map(wrong, mesh=mesh, in_specs="b/dp", out_specs="b")
    try:
        for _ in range(2):
            (vf.pjit(f, mesh=mesh) if lowered else f)(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def other_order(process: int, processes: int) -> str:
    """Ranks that reach other collectives: what each process says."""
    mesh = vf.make_mesh(dp=2)

    def wrong(x: Tensor) -> Tensor:
        first = vf.psum(x, "dp")
        if process == 1:
            return first + vf.pmax(x, "dp")
        return first + vf.psum(2 * x, "dp")

    try:
        for _ in range(2):
            vf.shard_map(wrong, mesh=mesh, in_specs="b/dp", out_specs="b")(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def one_raises(process: int, processes: int) -> str:
    """A body that raises on one process, between collectives."""
    mesh = vf.make_mesh(dp=2)

    def wrong(x: Tensor) -> Tensor:
        if process == 1:
            raise ValueError("no more data")
        return vf.psum(x, "dp")

    try:
        vf.shard_map(wrong, mesh=mesh, in_specs="b/dp", out_specs="b")(torch.ones(4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
