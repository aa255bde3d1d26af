"""Errors about regions, each with its exact text. Lines of the user's that follow are left out where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vjp

import vescale_fn as vf

mesh = vf.make_mesh(dp=2, tp=2)
other = vf.make_mesh(dp=4)
x = torch.ones(4, 6)


def block(x: Tensor, params: Any = None) -> Tensor:
    return x


def run(f: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any, **options: Any) -> Any:
    options.setdefault("mesh", mesh)
    return vf.shard_map(f, in_specs=in_specs, out_specs=out_specs, **options)(*args)


def kept_for_another(x: Tensor) -> Any:
    kept: list[Tensor] = []
    run(lambda x: kept.append(x) or x, "b/dp s", "b/dp s", x)
    return run(block, "b/dp s", "b/dp s", kept[0])


def by_hand(x: Tensor) -> Tensor:
    """The cotangent of a sum, which is invarying, made from what varies."""
    return vjp(lambda t: vf.psum(t, "dp"), x)[1](x)[0]


def sent(x: Tensor, counts: Tensor) -> Tensor:
    return vf.ragged_all_to_all(x, x, counts, counts, counts, counts, "dp")


MESSAGES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: run(block, "b/dp s", "b/dp s", torch.ones(5, 6)),
        "shard_map(block): argument x: Dim 0 has size 5, which is not divisible by dp=2. Pad it to 6, and mask what is "
        "added: the ranks of a region hold parts of one shape. Or leave the axis to the solver (axis_names), which "
        "takes uneven shards.\n  b/dp s\n    ^",
    ),
    (
        lambda: run(block, ("b s", {"w": [None, "d/(dp tp)"]}), "b s", x, {"w": [1, x[0]]}),
        "shard_map(block): argument params.w.1: Dim 0 has size 6, which is not divisible by dp=2*tp=2. Pad it to 8, "
        "and mask what is added: the ranks of a region hold parts of one shape. Or leave the axis to the solver "
        "(axis_names), which takes uneven shards.\n  d/(dp tp)\n     ^",
    ),
    (
        lambda: run(block, "b~/dp s", "b/dp s", torch.ones(5, 6)),
        "shard_map(block): the spec 'b~/dp s' of argument x cuts unevenly, and the ranks of a region hold parts of one "
        "shape. Pad the dim to a multiple of the ranks, and mask what is added; or leave the axis to the solver "
        "(axis_names), which takes uneven shards.",
    ),
    (
        lambda: run(block, "b~[3 1]/dp s", "b/dp s", x),
        "shard_map(block): the spec 'b~[3 1]/dp s' of argument x cuts unevenly, and the ranks of a region hold parts "
        "of one shape. Pad the dim to a multiple of the ranks, and mask what is added; or leave the axis to the solver "
        "(axis_names), which takes uneven shards.",
    ),
    (
        lambda: run(block, "b/dp", "b/dp s", x),
        "shard_map(block): argument x: The spec has 1 dim, but the tensor of shape [4, 6] has 2 dims.\n  b/dp\n  ^",
    ),
    (
        lambda: run(block, "b/pp s", "b/dp s", x),
        "shard_map(block): argument x: There is no mesh axis 'pp': this mesh has dp=2, tp=2.\n  b/pp s\n    ^",
    ),
    (
        lambda: run(block, "b/dp s(", "b/dp s", x),
        "shard_map(block): in_specs: 0: Expected a factor or ')', found the end of the spec.\n  b/dp s(\n         ^",
    ),
    (
        lambda: run(block, "b s {max: tp}", "b s", x),
        "shard_map(block): the spec 'b s {max: tp}' of argument x has a pending max. Only sums ('sum') and "
        "values whose gradient is a sum ('ct') may cross the edge of a region.",
    ),
    (
        lambda: run(block, "b/dp s", "b/dp s t", x),
        "shard_map(block): the result: The spec has 3 dims, but the tensor of shape [2, 6] has 2 dims.\n  b/dp "
        "s t\n  ^",
    ),
    (
        lambda: run(lambda x: x.sum(), "b/dp s", "b/dp", x),
        "shard_map(<lambda>): the result has no dims for the out_spec 'b/dp'. Return x[None] to stack one "
        "entry of each rank.",
    ),
    (
        lambda: run(lambda x: {"loss": x.sum()}, "b/dp s", "", x),
        "shard_map(<lambda>): output loss is varying over 'dp', but its out_spec does not name 'dp', which "
        "promises the same value on all of its ranks. Make it the same with vf.psum(x, 'dp') or another "
        "reduction, or name 'dp' in the out_spec, as in 'b/dp ...'.",
    ),
    (
        lambda: run(lambda x: vf.pcast(x, "dp", to="unreduced"), "b/dp s", "b s", x),
        "shard_map(<lambda>): the result is unreduced over 'dp', but its out_spec does not name 'dp', which "
        "promises the same value on all of its ranks. Make it the same with vf.psum(x, 'dp'), or name 'dp' in "
        "the out_spec, as in 'b/dp ...'.",
    ),
    (
        lambda: run(block, "b/dp s", "b s {sum: dp}", x),
        "shard_map(block): the out_spec of the result says {sum: dp}, but the value is varying over 'dp'. "
        "Write vf.pcast(x, 'dp', to='unreduced') first.",
    ),
    (
        lambda: run(block, "b/dp s", "b/dp s", x, axis_names={"tp"}),
        "shard_map(block): the in_spec of argument x names axis 'dp', which is not manual: the region is over "
        "tp. Leave 'dp' out (the solver places the other axes), or add it to axis_names.",
    ),
    (
        lambda: run(block, "b/dp s", "b/dp s", x, axis_names={"pp"}),
        "shard_map(block): axis_names has 'pp', but the axes of the mesh are dp, tp.",
    ),
    (
        lambda: run(lambda x: run(block, "b s", "b s", x, axis_names={"dp"}), "b/dp s", "b/dp s", x),
        "shard_map(block): axis 'dp' is manual already, in the region of <lambda> around it. A region adds "
        "other axes: name them in axis_names.",
    ),
    (
        lambda: vf.shard_map(block, mesh=mesh, in_specs="b s", out_specs="b s")(x=x),
        "shard_map(block): in_specs speak of positional arguments, and x came as keyword. Pass it by position, "
        "or bind it with functools.partial.",
    ),
    (
        lambda: run(block, ("b s", "b s", "b s"), "b s", x),
        "shard_map(block): in_specs has 3 entries for 1 arguments. Give a tuple with one prefix tree of specs "
        "for each argument, or one spec for all.",
    ),
    (
        lambda: run(block, ("b s", {"w": ""}), "b s", x, {"v": x}),
        "shard_map(block): in_specs at '1' say nothing about v and name w, which the tree does not have, but "
        "the tree has v. Specs form a prefix of the tree.",
    ),
    (
        lambda: vf.shard_map(block, mesh=mesh, in_shardings="b s", out_specs="b s", in_specs=""),
        "shard_map(block) speaks of specs: write in_specs= instead of in_shardings= (pjit has shardings).",
    ),
    (
        lambda: vf.shard_map(block, mesh=mesh, in_specs="b s", out_specs="b s", axes=1),
        "shard_map(block) has no keyword axes. It has mesh, in_specs, out_specs, axis_names and check_vma.",
    ),
    (
        lambda: run(block, "b s", "b s", x, mesh=None),
        "shard_map(block): no argument is an Array, no region or pjit is around it, and no mesh= was given. "
        "Pass mesh=vf.make_mesh(...).",
    ),
    (
        lambda: run(block, "b s", "b s", vf.device_put(x, "b s", other)),
        "shard_map(block): argument x is on mesh dp=4, and the region on mesh dp=2,tp=2. Move it with "
        "vf.device_put, or leave mesh= out.",
    ),
    (
        lambda: vf.pjit(vf.shard_map(block, mesh=other, in_specs="b s", out_specs="b s"), mesh=mesh)(x),
        "shard_map(block): mesh=dp=4 is another mesh than dp=2,tp=2, on which the function around it runs. "
        "Leave mesh= out: the mesh is inherited.",
    ),
    (
        lambda: vf.psum(x, "dp"),
        "vf.psum: no region is under way, so there is no rank to speak of. Call it in the body of a function "
        "that runs under vf.shard_map(fn, mesh=..., in_specs=..., out_specs=...).",
    ),
    (
        lambda: run(lambda x: vf.psum(x, "pp"), "b s", "b s", x),
        "vf.psum: no axis 'pp'. The region is over dp, tp.",
    ),
    (
        lambda: run(lambda x: vf.psum(x, "tp"), "b s", "b s", x, axis_names={"dp"}),
        "vf.psum: axis 'tp' belongs to the solver here. The region is over dp; add 'tp' to axis_names of the "
        "shard_map to use it.",
    ),
    (
        lambda: run(lambda x: vf.all_gather(x, 0), "b s", "b s", x),
        "vf.all_gather: axis=0 is a number. 'axis' always is a mesh axis; a tensor dimension is called 'dim': "
        "write dim=0, and name the mesh axis.",
    ),
    (
        lambda: run(lambda x: vf.all_gather(x, "dp", 5), "b/dp s", "b s", x),
        "vf.all_gather: dim=5 is no dim of a tensor with 3 dims. Use -3 to 2.",
    ),
    (
        lambda: run(lambda x: vf.psum_scatter(x, "dp", 0, tiled=True), "b s", "b/dp s", x[:3]),
        "vf.psum_scatter: dim=0 has size 3, which 2 ranks along 'dp' do not divide. Pad the dim to 4, or "
        "choose another.",
    ),
    (
        lambda: run(lambda x: vf.psum_scatter(x, "dp", 0), "b s", "b/dp s", x),
        "vf.psum_scatter: without tiled=True, dim=0 must have one entry for each of the 2 ranks along 'dp', "
        "but its size is 4. Pass tiled=True to cut the dim in 2 pieces.",
    ),
    (
        lambda: run(lambda x: vf.ppermute(x, "dp"), "b s", "b s", x),
        "vf.ppermute: say where values go by perm=[(source, destination), ...] or by shift=k, not both or neither.",
    ),
    (
        lambda: run(lambda x: vf.ppermute(x, "dp", [(0, 1), (1, 1)]), "b/dp s", "b/dp s", x),
        "vf.ppermute: destination 1 appears twice. Ranks along 'dp' are 0 to 1, and each may send and receive once.",
    ),
    (
        lambda: run(lambda x: vf.ppermute(x, "dp", [(0, 2)]), "b/dp s", "b/dp s", x),
        "vf.ppermute: destination 2 is no rank. Ranks along 'dp' are 0 to 1, and each may send and receive once.",
    ),
    (
        lambda: run(lambda x: vf.pbroadcast(x, "dp", 2), "b/dp s", "b/dp s", x),
        "vf.pbroadcast: source=2 is no rank. Ranks along 'dp' are 0 to 1, and each may send and receive once.",
    ),
    (
        lambda: run(lambda x: vf.psum(vf.pcast(x, "dp", to="unreduced"), ("dp", "tp")), "b/dp s/tp", "b s", x),
        "vf.psum: the operand is unreduced over 'dp', varying over 'tp', and one collective needs one state. "
        "Call vf.psum once for the axes of each state.",
    ),
    (
        lambda: run(lambda x: vf.all_gather(vf.pcast(x, "dp", to="unreduced"), "dp"), "b/dp s/tp", "b s", x),
        "vf.all_gather: the operand holds parts of a sum over 'dp'. Reduce it first: vf.psum(x, 'dp'), or "
        "vf.psum_scatter(x, 'dp', dim=...).",
    ),
    (
        lambda: run(lambda x: grad(lambda x: vf.pmax(x, "dp").sum())(x), "b/dp s", "b/dp s", x),
        "vf.pmax over 'dp' has no derivative. Where the value does not matter to the gradient (a shift inside "
        "a softmax), write vf.pmax(x.detach(), 'dp').",
    ),
    (
        lambda: run(lambda x: grad(lambda x: vf.all_gather(x, "dp").sum())(x), "b/dp s", "b/dp s", x.bfloat16()),
        "vf.all_gather of bfloat16: its gradient is a psum_scatter, a sum in bfloat16. Say in which dtype to "
        "sum: grad_dtype=torch.float32, or grad_dtype=torch.bfloat16 if that is meant.",
    ),
    (
        lambda: run(lambda x: vf.pcast(x, "dp", to="invarying"), "b/dp s", "b s", x),
        "vf.pcast: a value that varies over 'dp' cannot be called invarying: the ranks hold different values. "
        "Make them one: vf.psum(x, 'dp') or vf.all_gather(x, 'dp', to='invarying').",
    ),
    (
        lambda: run(lambda x: vf.pcast(vf.pcast(x, "dp", to="unreduced"), "dp", to="varying"), "b/dp s", "b s", x),
        "vf.pcast: parts of a sum over 'dp' are no varying value. Reduce them: vf.psum(x, 'dp') or "
        "vf.psum_scatter(x, 'dp', dim=...).",
    ),
    (
        lambda: run(lambda x: vf.pcast(vf.pcast(x, "dp", to="reduced"), "dp", to="unreduced"), "b s", "b s", x),
        "vf.pcast: there is no cast from reduced to unreduced over 'dp'.",
    ),
    (
        lambda: run(lambda x: vf.pcast(x, "dp", to="partial"), "b/dp s", "b s", x),
        "vf.pcast: to='partial' is no state. Use 'varying', 'invarying', 'unreduced' or 'reduced'.",
    ),
    (
        lambda: run(lambda x: vf.pcast(x, "dp", to="unreduced").relu(), "b/dp s", "b s", x),
        "torch.Tensor.relu: a value holds parts of a sum over 'dp', and torch.Tensor.relu of the parts is not the "
        "part of torch.Tensor.relu. Reduce it first: x = vf.psum(x, 'dp').",
    ),
    (
        lambda: run(lambda x: vf.pcast(x, "dp", to="unreduced") * x, "b/dp s", "b s", x),
        "torch.Tensor.mul: a value holds parts of a sum over 'dp', and 'x' is varying over it. Reduce the sum "
        "first: vf.psum(..., 'dp').",
    ),
    (
        lambda: run(lambda x: vf.pcast(x, "dp", to="unreduced") * torch.ones(6), "b/dp s", "b s", x),
        "torch.Tensor.mul: a value holds parts of a sum over 'dp', and a value is invarying over it. For a "
        "product, write x = vf.pcast(x, 'dp', to='reduced'); for a sum, x = vf.pcast(x, 'dp', to='unreduced').",
    ),
    (
        lambda: run(lambda x: torch.zeros(2, 6).add_(x), "b/dp s", "b/dp s", x),
        "torch.Tensor.add_: a value is invarying over 'dp', and what is written into it is varying. Make room "
        "for it first: x = vf.pcast(x, 'dp', to='varying').",
    ),
    (
        lambda: run(lambda x: grad(lambda x: x.sum())(vf.pcast(x, "dp", to="reduced")), "b s", "b s", x),
        "torch.func.grad: the loss is reduced over 'dp': every rank would count it, so its gradient would be "
        "too large. Write loss = vf.pcast(loss, 'dp', to='invarying').",
    ),
    (
        lambda: run(lambda x: x if x.sum() > 0 else -x, "b/dp s", "b/dp s", x),
        "The value of bool[] {V: dp} differs between the ranks along 'dp', so Python cannot read one number of "
        "it. Use torch.where in place of a branch, or reduce it first: vf.psum(x, 'dp').",
    ),
    (
        lambda: run(lambda x: vf.reshard(x, "b s -> b/dp s"), "b/dp s", "b/dp s", x),
        "vf.reshard: 'b s -> b/dp s' takes this rank's slice of a value that all ranks along 'dp' hold, but the value "
        "is varying over 'dp'. For the slice of a sum, write {sum: dp} on the left.",
    ),
    (
        lambda: run(lambda x: vf.reshard(x, "b/tp s"), "b/dp s", "b/dp s", x),
        "vf.reshard: 'b/tp s' names 'tp', which is manual here: a rank cannot ask for a layout along it. Write the "
        "collective as a pattern, 'before -> after', or leave the axis out.",
    ),
    (
        lambda: run(lambda x: vf.all_gather(x, axis=0), "b s", "b s", x),
        "vf.all_gather: axis=0 is a number. 'axis' always is a mesh axis; a tensor dimension is called 'dim': write "
        "dim=0, and name the mesh axis.",
    ),
    (
        lambda: vf.pjit(kept_for_another, mesh=mesh)(x),
        "A value of a region over ('dp', 'tp') would enter such a region again: it was kept from one call of a "
        "shard_map for another. Return it with an out_spec, and pass it with an in_spec.",
    ),
    (
        lambda: vf.pjit(lambda x: run(by_hand, "b/dp s", "b/dp s", x), mesh=mesh)(x),
        "vescale_fn.cast: the value is varying over 'dp', where invarying is needed. A cast was missed: if a cotangent "
        "was made by hand, cast it to the state of what it belongs to, vf.pcast(ct, 'dp', to=...).",
    ),
    (
        lambda: torch.vmap(lambda n: run(lambda x: sent(x, n), "b/dp s", "b/dp s", x))(torch.ones(3, 2).long()),
        "vf.ragged_all_to_all: offsets and sizes cannot be mapped by torch.vmap. Map the rows only, or loop.",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), MESSAGES)
def test_message(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
        wrong()
    assert str(error.value).partition("\n  at ")[0] == message


def test_a_message_ends_with_the_line_of_the_user() -> None:
    with pytest.raises(ValueError, match="parts of a sum") as error:
        run(lambda x: vf.pcast(x, "dp", to="unreduced").relu(), "b/dp s", "b s", x)
    assert str(error.value).endswith('x: vf.pcast(x, "dp", to="unreduced").relu(), "b/dp s", "b s", x)')


def test_a_sum_of_what_is_summed_warns_that_it_counts_n_times() -> None:
    message = (
        "vf.psum: the operand is the same on all ranks along 'dp' already, so the sum is 2 times it. If that is meant, "
        "write vf.pcast(x, 'dp', to='varying') first."
    )
    with pytest.warns(UserWarning, match="same on all ranks") as warned:
        total = run(lambda x: vf.psum(vf.psum(x, "dp"), "dp"), "b/dp s", "b s", x)
    assert [str(w.message) for w in warned] == [message]
    assert torch.equal(total, torch.full((2, 6), 4.0))


@pytest.mark.parametrize("lowered", [False, True])
def test_a_carry_that_changes_state_says_what_to_cast(lowered: bool) -> None:
    def loop(xs: Tensor) -> Any:
        return vf.scan(lambda c, row: ({"sum": c["sum"] + row}, None), {"sum": torch.zeros(2)}, xs)[0]

    step = vf.shard_map(loop, mesh=mesh, in_specs="t b/dp", out_specs="b/dp")
    with pytest.raises(ValueError, match="the carry") as error:
        (vf.pjit(step, mesh=mesh) if lowered else step)(x[:, :4])
    assert str(error.value) == (
        "vf.scan: the carry sum is invarying over 'dp' at the start, and varying after one step. Cast the start: "
        "init = vf.pcast(init, 'dp', to='varying')."
    )
