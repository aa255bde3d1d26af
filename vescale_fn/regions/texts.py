"""The text of errors about regions: what was asked, where, the states, and the line to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vescale_fn.errors import one_line
from vescale_fn.regions.states import NAMES, State
from vescale_fn.sharding.graph import Eqn, Source, op_name


class RegionError(ValueError):
    """A region that cannot mean what it says."""


def _axes(axes: Sequence[str]) -> str:
    return f"'{axes[0]}'" if len(axes) == 1 else f"({', '.join(repr(a) for a in axes)})"


def _at(source: Source) -> str:
    return f"\n  at {source}: {source.code}" if source.file else ""


def _value(name: str) -> str:
    return f"'{name}'" if name else "a value"


# ---- collectives


def outside(function: str) -> str:
    return (
        f"vf.{function}: no region is under way, so there is no rank to speak of. Call it in the body of a function "
        "that runs under vf.shard_map(fn, mesh=..., in_specs=..., out_specs=...)."
    )


def unbound_axis(function: str, axis: str, manual: Sequence[str], mesh: Sequence[str]) -> str:
    known = f"The region is over {one_line(manual)}"
    if axis in mesh:
        return (
            f"vf.{function}: axis '{axis}' belongs to the solver here. {known}; add '{axis}' to axis_names of the "
            "shard_map to use it."
        )
    return f"vf.{function}: no axis '{axis}'. {known}."


def axis_is_number(function: str, axis: object) -> str:
    return (
        f"vf.{function}: axis={axis!r} is a number. 'axis' always is a mesh axis; a tensor dimension is called 'dim': "
        f"write dim={axis!r}, and name the mesh axis."
    )


def bad_dim(function: str, what: str, dim: int, ndim: int) -> str:
    return f"vf.{function}: {what}={dim} is no dim of a tensor with {ndim} dims. Use {-ndim} to {ndim - 1}."


def not_divisible(function: str, what: str, dim: int, size: int, axes: Sequence[str], n: int) -> str:
    return (
        f"vf.{function}: {what}={dim} has size {size}, which {n} ranks along {_axes(axes)} do not divide. "
        f"Pad the dim to {-(-size // n) * n}, or choose another."
    )


def not_one_each(function: str, what: str, dim: int, size: int, axes: Sequence[str], n: int) -> str:
    return (
        f"vf.{function}: without tiled=True, {what}={dim} must have one entry for each of the {n} ranks along "
        f"{_axes(axes)}, but its size is {size}. Pass tiled=True to cut the dim in {n} pieces."
    )


def bad_pairs(function: str, axes: Sequence[str], n: int, problem: str) -> str:
    return f"vf.{function}: {problem}. Ranks along {_axes(axes)} are 0 to {n - 1}, and each may send and receive once."


def one_of_perm_and_shift() -> str:
    return "vf.ppermute: say where values go by perm=[(source, destination), ...] or by shift=k, not both or neither."


def mixed_states(function: str, states: Mapping[str, State]) -> str:
    found = one_line([f"{NAMES[s]} over '{a}'" for a, s in states.items()])
    return (
        f"vf.{function}: the operand is {found}, and one collective needs one state. "
        f"Call vf.{function} once for the axes of each state."
    )


def summed_again(axes: Sequence[str], n: int) -> str:
    return (
        f"vf.psum: the operand is the same on all ranks along {_axes(axes)} already, so the sum is {n} times it. "
        f"If that is meant, write vf.pcast(x, {_axes(axes)}, to='varying') first."
    )


def of_unreduced(function: str, axes: Sequence[str]) -> str:
    return (
        f"vf.{function}: the operand holds parts of a sum over {_axes(axes)}. "
        f"Reduce it first: vf.psum(x, {_axes(axes)}), or vf.psum_scatter(x, {_axes(axes)}, dim=...)."
    )


def batched_sizes() -> str:
    return "vf.ragged_all_to_all: offsets and sizes cannot be mapped by torch.vmap. Map the rows only, or loop."


def not_differentiable(kind: str, axes: str, source: Source) -> str:
    names = [pair.split("=")[0] for pair in axes.split(",")]
    return (
        f"vf.p{kind} over {_axes(names)} has no derivative. Where the value does not matter to the gradient (a shift "
        f"inside a softmax), write vf.p{kind}(x.detach(), {_axes(names)})." + _at(source)
    )


def reducing_backward(function: str, dtype: str, backward: str) -> str:
    return (
        f"vf.{function} of {dtype}: its gradient is a {backward}, a sum in {dtype}. Say in which dtype to sum: "
        f"grad_dtype=torch.float32, or grad_dtype=torch.{dtype} if that is meant."
    )


def not_whole(text: str, axis: str, state: State) -> str:
    return (
        f"vf.reshard: '{text}' takes this rank's slice of a value that all ranks along '{axis}' hold, but the value is "
        f"{NAMES[state]} over '{axis}'. For the slice of a sum, write {{sum: {axis}}} on the left."
    )


def manual_spec(spec: str, axis: str) -> str:
    return (
        f"vf.reshard: '{spec}' names '{axis}', which is manual here: a rank cannot ask for a layout along it. Write "
        "the collective as a pattern, 'before -> after', or leave the axis out."
    )


# ---- casts and states


def no_cast(axis: str, before: State, after: State) -> str:
    if before == "V" and after in ("I", "R"):
        return (
            f"vf.pcast: a value that varies over '{axis}' cannot be called {NAMES[after]}: the ranks hold different "
            f"values. Make them one: vf.psum(x, '{axis}') or vf.all_gather(x, '{axis}', to='{NAMES[after]}')."
        )
    if before == "U":
        return (
            f"vf.pcast: parts of a sum over '{axis}' are no {NAMES[after]} value. Reduce them: vf.psum(x, '{axis}') or "
            f"vf.psum_scatter(x, '{axis}', dim=...)."
        )
    return f"vf.pcast: there is no cast from {NAMES[before]} to {NAMES[after]} over '{axis}'."


def bad_state(name: str) -> str:
    return f"vf.pcast: to={name!r} is no state. Use 'varying', 'invarying', 'unreduced' or 'reduced'."


def unreduced(function: str, names: Sequence[str], axis: str, source: Source) -> str:
    value = next((n for n in names if n), "")
    target = value or "x"
    return (
        f"{function}: {_value(value)} holds parts of a sum over '{axis}', and {function} of the parts is not the part "
        f"of {function}. Reduce it first: {target} = vf.psum({target}, '{axis}')." + _at(source)
    )


def mixed(function: str, summed: str, other: str, state: State, axis: str, source: Source) -> str:
    target = other or "x"
    head = (
        f"{function}: {_value(summed)} holds parts of a sum over '{axis}', and {_value(other)} is {NAMES[state]} over "
        f"it. "
    )
    if state == "V":
        line = f"{summed} = vf.psum({summed}, '{axis}')" if summed else f"vf.psum(..., '{axis}')"
        return head + f"Reduce the sum first: {line}." + _at(source)
    return (
        head + f"For a product, write {target} = vf.pcast({target}, '{axis}', to='reduced'); for a sum, "
        f"{target} = vf.pcast({target}, '{axis}', to='unreduced')." + _at(source)
    )


def cast_in_place(function: str, name: str, step: tuple[State, State], axes: Sequence[str], source: Source) -> str:
    before, after = step
    target = name or "x"
    return (
        f"{function}: {_value(name)} is {NAMES[before]} over {_axes(axes)}, and what is written into it is "
        f"{NAMES[after]}. Make room for it first: "
        f"{target} = vf.pcast({target}, {_axes(axes)}, to='{NAMES[after]}')." + _at(source)
    )


def reduced_loss(axes: Sequence[str], source: Source) -> str:
    return (
        f"torch.func.grad: the loss is reduced over {_axes(axes)}: every rank would count it, so its gradient would be "
        f"too large. Write loss = vf.pcast(loss, {_axes(axes)}, to='invarying')." + _at(source)
    )


def carry_state(path: str, axis: str, before: State, after: State) -> str:
    which = f"the carry {path}" if path else "the carry"
    return (
        f"vf.scan: {which} is {NAMES[before]} over '{axis}' at the start, and {NAMES[after]} after one step. Cast the "
        f"start: init = vf.pcast(init, '{axis}', to='{NAMES[after]}')."
    )


def wrong_state(e: Eqn, axis: str, expected: State, found: State) -> str:
    what = "a gradient that leaves its region" if op_name(e.op).endswith("to_global") else op_name(e.op)
    return (
        f"{what}: the value is {NAMES[found]} over '{axis}', where {NAMES[expected]} is needed. A cast was missed: if "
        f"a cotangent was made by hand, cast it to the state of what it belongs to, vf.pcast(ct, '{axis}', to=...)."
        + _at(e.source)
    )


def reads_varying(what: str, axes: Sequence[str], source: Source) -> str:
    return (
        f"The value of {what} differs between the ranks along {_axes(axes)}, so Python cannot read one number of it. "
        f"Use torch.where in place of a branch, or reduce it first: vf.psum(x, {_axes(axes)})." + _at(source)
    )


def entered_twice(axes: Sequence[str], source: Source) -> str:
    return (
        f"A value of a region over {_axes(axes)} would enter such a region again: it was kept from one call of a "
        "shard_map for another. Return it with an out_spec, and pass it with an in_spec." + _at(source)
    )


# ---- shard_map


def no_mesh(name: str) -> str:
    return (
        f"shard_map({name}): no argument is an Array, no region or pjit is around it, and no mesh= was given. "
        "Pass mesh=vf.make_mesh(...)."
    )


def foreign_mesh(name: str, path: str, mesh: object, other: object) -> str:
    return (
        f"shard_map({name}): argument {path} is on mesh {other}, and the region on mesh {mesh}. "
        "Move it with vf.device_put, or leave mesh= out."
    )


def other_mesh(name: str, mesh: object, other: object) -> str:
    return (
        f"shard_map({name}): mesh={mesh} is another mesh than {other}, on which the function around it runs. "
        "Leave mesh= out: the mesh is inherited."
    )


def opened_twice(name: str, axes: Sequence[str], around: str) -> str:
    return (
        f"shard_map({name}): axis {_axes(axes)} is manual already, in the region of {around} around it. "
        "A region adds other axes: name them in axis_names."
    )


def unknown_axis_names(name: str, axes: Sequence[str], mesh: Sequence[str]) -> str:
    return f"shard_map({name}): axis_names has {_axes(axes)}, but the axes of the mesh are {one_line(mesh)}."


def not_manual(name: str, path: str, which: str, axis: str, manual: Sequence[str]) -> str:
    return (
        f"shard_map({name}): {which} of {path} names axis '{axis}', which is not manual: the region is over "
        f"{one_line(manual)}. Leave '{axis}' out (the solver places the other axes), or add it to axis_names."
    )


def keyword_arguments(name: str, names: Sequence[str]) -> str:
    return (
        f"shard_map({name}): in_specs speak of positional arguments, and {one_line(names)} came as keyword. "
        "Pass it by position, or bind it with functools.partial."
    )


def number_of_specs(name: str, specs: int, args: int) -> str:
    return (
        f"shard_map({name}): in_specs has {specs} entries for {args} arguments. Give a tuple with one prefix tree of "
        "specs for each argument, or one spec for all."
    )


def shardings_in_shard_map(name: str, keyword: str) -> str:
    other = keyword.replace("shardings", "specs")
    return f"shard_map({name}) speaks of specs: write {other}= instead of {keyword}= (pjit has shardings)."


def unknown_keyword(name: str, keyword: str) -> str:
    return f"shard_map({name}) has no keyword {keyword}. It has mesh, in_specs, out_specs, axis_names and check_vma."


def pad(fitting: int) -> str:
    return (
        f"Pad it to {fitting}, and mask what is added: the ranks of a region hold parts of one shape. "
        "Or leave the axis to the solver (axis_names), which takes uneven shards."
    )


def uneven(name: str, path: str, spec: str) -> str:
    return (
        f"shard_map({name}): the spec '{spec}' of {path} cuts unevenly, and the ranks of a region hold parts of one "
        "shape. Pad the dim to a multiple of the ranks, and mask what is added; or leave the axis to the solver "
        "(axis_names), which takes uneven shards."
    )


def pending_at_edge(name: str, path: str, spec: str, kind: str) -> str:
    return (
        f"shard_map({name}): the spec '{spec}' of {path} has a pending {kind}. Only sums ('sum') and values whose "
        "gradient is a sum ('ct') may cross the edge of a region."
    )


def broken_promise(name: str, path: str, axis: str, state: State) -> str:
    reduce = f"vf.psum(x, '{axis}')" if state != "V" else f"vf.psum(x, '{axis}') or another reduction"
    return (
        f"shard_map({name}): {path} is {NAMES[state]} over '{axis}', but its out_spec does not name '{axis}', "
        f"which promises the same value on all of its ranks. Make it the same with {reduce}, or name '{axis}' in the "
        "out_spec, as in 'b/" + axis + " ...'."
    )


def not_a_sum(name: str, path: str, axis: str, state: State) -> str:
    return (
        f"shard_map({name}): the out_spec of {path} says {{sum: {axis}}}, but the value is {NAMES[state]} over "
        f"'{axis}'. Write vf.pcast(x, '{axis}', to='unreduced') first."
    )


def scalar_output(name: str, path: str, spec: str) -> str:
    return (
        f"shard_map({name}): {path} has no dims for the out_spec '{spec}'. "
        "Return x[None] to stack one entry of each rank."
    )
