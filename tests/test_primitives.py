"""reshard is the identity under every transform, and leaves one node with its spec."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

from vescale_fn.interpret import run_graph
from vescale_fn.primitives import RESHARD, constraint_layout, cotangent_spec, reshard, with_sharding_constraint
from vescale_fn.sharding.layout import Layout, Shard
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.spec import SpecError
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval, Traced

F64 = torch.float64
MESH = MeshShape(("dp", "tp"), (2, 2))


def traced(fn: Any, *shapes: tuple[int, ...]) -> Traced:
    return trace_flat(lambda *x: [fn(*x)], [Aval(s, F64) for s in shapes])


def specs(t: Traced) -> list[str]:
    return [e.args[1] for e in t.graph.eqns if e.op is RESHARD]


def constrained(x: torch.Tensor) -> torch.Tensor:
    return reshard(x.sin(), "a/dp b").cos().sum()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin().cos().sum()


TRANSFORMS = {
    "grad": (grad, ["a/dp b"] * 2),
    "vmap": (vmap, ["_ a/dp b"]),
    "vmap of grad": (lambda f: vmap(grad(f)), ["_ a/dp b"] * 2),
    "jvp": (lambda f: lambda x: jvp(f, (x,), (x,))[1], ["a/dp b"] * 2),
    "grad of grad": (lambda f: grad(lambda x: grad(f)(x).sin().sum()), ["a/dp b"] * 4),
    "jvp of grad": (lambda f: lambda x: jvp(grad(f), (x,), (x,))[1], ["a/dp b"] * 4),
    "vjp": (lambda f: lambda x: vjp(f, x)[1](torch.ones((), dtype=F64))[0], ["a/dp b"] * 2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_identity_under_transforms(name: str) -> None:
    transform, wanted = TRANSFORMS[name]
    x = torch.rand((2, 3, 4) if "vmap" in name else (3, 4), dtype=F64)
    t = traced(transform(constrained), tuple(x.shape))
    assert torch.equal(run_graph(t.graph, [x])[0], transform(plain)(x))
    assert specs(t) == wanted


def test_batch_dim_is_put_first() -> None:
    x = torch.rand(3, 2, 4, dtype=F64)
    t = traced(vmap(lambda x: reshard(x, "a/dp b"), in_dims=1, out_dims=2), (3, 2, 4))
    assert torch.equal(run_graph(t.graph, [x])[0], x.transpose(1, 2))
    assert specs(t) == ["_ a/dp b"]


def test_gradient_of_a_partial_sum_is_whole() -> None:
    assert cotangent_spec("a/dp {sum: tp}") == "a/dp {ct: tp}"
    assert cotangent_spec("a/dp {max: tp}") == "a/dp"
    assert cotangent_spec("") == ""


def test_without_a_mesh_only_the_shape_is_checked() -> None:
    x = torch.rand(4, 6)
    assert reshard(x, "b (qkv h/tp)", qkv=3) is x
    assert with_sharding_constraint is reshard
    with pytest.raises(SpecError) as e:
        reshard(x, "b")
    assert str(e.value) == ("vf.reshard: The spec has 1 dim, but the tensor of shape [4, 6] has 2 dims.\n  b\n  ^")
    with pytest.raises(SpecError, match=r"vf\.reshard"):
        reshard(x, "b (qkv h)", qkv=4)


def test_constraint_layout_has_the_sizes_of_the_call() -> None:
    t = traced(lambda x: reshard(x, "b/dp (qkv h/tp k)", qkv=3, h=2), (4, 12))
    (e,) = t.graph.eqns
    assert constraint_layout(e, MESH) == Layout.of(MESH, (4, 12), {"dp": Shard(0), "tp": Shard(1, 3)})
    assert e.source.code.startswith("t = traced(lambda x: reshard")


def test_unknown_axis_names_the_line() -> None:
    t = traced(lambda x: reshard(x, "b/nope"), (4,))
    (e,) = t.graph.eqns
    with pytest.raises(SpecError) as error:
        constraint_layout(e, MESH)
    assert str(error.value) == (
        f'vf.reshard at {__file__}:{e.source.line}: t = traced(lambda x: reshard(x, "b/nope"), (4,)): '
        "There is no mesh axis 'nope': this mesh has dp=2, tp=2.\n  b/nope\n    ^"
    )
