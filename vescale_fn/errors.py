"""The text of errors: what was asked, where, what exists, and the fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def one_line(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


# ---- Arrays


def donated_array(what: str, gone: str) -> str:
    return (
        f"This Array ({what}) was {gone}: it holds nothing any more. "
        "Use the value that the call returned, or leave the argument out of donate_argnums."
    )


def needs_full(what: str) -> str:
    return (
        f"The value of this Array ({what}) is spread over ranks, and reading it here would communicate. "
        "Call .full() on every process, then read the result."
    )


def abstract_array(what: str) -> str:
    return (
        f"This Array ({what}) lives on an abstract mesh: it has a shape and a sharding, but no values. "
        "Use vf.make_mesh and vf.device_put for Arrays that hold something."
    )


def array_is_immutable() -> str:
    return "Arrays are immutable. Make a new one: torch.where(mask, new, x), x.index_put(indices, values) or x.clone()."


# ---- placement


def described_only(path: str, mesh: object) -> str:
    return (
        f"vf.device_put: {path or 'the value'} is a ShapeDtype, which holds no values to put on mesh {mesh}. "
        "Use vf.abstract_mesh to lower without values, or pass a tensor."
    )


def bad_value(path: str, kind: str) -> str:
    return (
        f"vf.device_put: {path or 'the value'} is of type {kind}. Leaves must be Arrays, tensors, numbers or None: "
        "convert it with torch.as_tensor, or leave it out of the tree."
    )


def no_mesh_to_put_on() -> str:
    return (
        "vf.device_put: nothing says on which mesh. Pass mesh=vf.make_mesh(...), a vf.NamedSharding in the place of a "
        "spec, or Arrays that are on a mesh already."
    )


def put_in_region(what: str, region: str) -> str:
    return (
        f"{what}: in the region of {region}, a rank holds its part of a value and can place no other. Write the "
        "collective, as in vf.reshard(x, 'b/dp d -> b d'), or place the value before the region."
    )


def put_in_trace(what: str, function: str) -> str:
    return (
        f"{what}: {function} is being traced, and its values have no place yet. Write vf.reshard(x, spec), which says "
        "where a value is to live; or place it before the call."
    )


def nothing_to_make(what: str, mesh: object) -> str:
    return f"{what}: mesh {mesh} is abstract and holds no parts. Use vf.device_put with a vf.ShapeDtype."


def strided_callback(spec: str) -> str:
    return (
        f"vf.make_array_from_callback: spec '{spec}' gives a rank several runs of one dim, which one slice cannot say. "
        "Make the Array with a contiguous spec, then move it with vf.device_put(x, spec)."
    )


def callback_shape(index: object, got: tuple[int, ...], wants: tuple[int, ...]) -> str:
    return (
        f"vf.make_array_from_callback: the callback returned shape {list(got)} for index {index}, which holds "
        f"{list(wants)}. Return exactly that part of the value."
    )


def not_rows(mesh: str, processes: int) -> str:
    return (
        f"vf.local_put: the ranks of mesh {mesh} that one of {processes} processes holds have no block of the value. "
        "Use vf.make_array_from_callback, which asks for the part of each rank."
    )


# ---- what a call is given


def bad_leaf(fn: str, path: str, kind: str) -> str:
    return (
        f"{fn}: argument {path} is of type {kind}. Leaves must be Arrays, tensors, numbers, None or constants: "
        "convert it with torch.as_tensor, or name the parameter in static_argnames."
    )


def described_argument(fn: str, path: str) -> str:
    return (
        f"{fn}: {path} is a ShapeDtype, which holds no values to compute with. "
        "Use .lower(...) with it, or an abstract mesh; pass a tensor or an Array to run."
    )


def unhashable_static(fn: str, name: str, kind: str) -> str:
    return (
        f"{fn}: static argument {name} is a {kind}, which is not hashable. Static arguments are part of the cache key; "
        "pass a hashable value (a tuple instead of a list), or make it a dynamic argument."
    )


def no_mesh(fn: str) -> str:
    return (
        f"{fn}: no argument is an Array and no mesh= was given, so there is no mesh to run on. "
        "Put the arguments on a mesh with vf.device_put(x, spec, mesh), or pass mesh=."
    )


def two_meshes(fn: str, a: str, mesh_a: str, b: str, mesh_b: str) -> str:
    return (
        f"{fn}: {a} is on mesh {mesh_a} and {b} is on mesh {mesh_b}. "
        "Everything in one call must be on one mesh; move one of them with vf.device_put(x, spec, mesh)."
    )


def sharding_mismatch(fn: str, path: str, has: str, wants: str) -> str:
    return (
        f"{fn}: argument {path} is an Array {has}, but in_shardings asks for {wants}. "
        "Move it first with vf.device_put(x, spec), or leave its sharding out of in_shardings."
    )


def shardings_count(fn: str, given: int, params: Sequence[str]) -> str:
    return (
        f"{fn}: in_shardings has {given} entries, but the call has {len(params)} arguments: {one_line(params)}. "
        "Give one for each, None where an argument keeps its own sharding."
    )


def donated_again(fn: str, path: str, what: str, gone: str) -> str:
    return (
        f"{fn}: {path} is an Array ({what}) that was {gone}: it holds nothing any more. "
        "Pass the value that the call returned, or leave the argument out of donate_argnums."
    )


def donated_twice(fn: str, first: str, second: str) -> str:
    return (
        f"{fn}: {first} and {second} are the same Array, and one of them is donated. "
        "Pass a copy (vf.device_put of it copies), or do not donate it."
    )


def lost_arguments(fn: str, paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"{fn} raised while it ran, so its donated arguments are lost: {one_line(paths[:3])}{more}. "
        'pjit(donate="safe") keeps them until a call has succeeded, at the price of memory for a second copy.'
    )


def many_values(fn: str, path: str, count: int) -> str:
    return (
        f"{fn}: {path} has taken {count} different values, and a new program is made for each. "
        "Pass a tensor or a float if the value varies from call to call."
    )


def many_shapes(fn: str, count: int, shapes: Mapping[str, Sequence[tuple[int, ...]]]) -> str:
    def text(found: Sequence[tuple[int, ...]]) -> str:
        return one_line([list(s) for s in found[:5]]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")

    paths = [f"{path} has been {text(found)}" for path, found in shapes.items()]
    more = f"; and {len(paths) - 3} other arguments changed too" if len(paths) > 3 else ""
    return (
        f"{fn} has been lowered for {count} sets of shapes, each of which takes a trace and a solve: "
        f"{'; '.join(paths[:3])}{more}. Pad to one shape, or to a few, with a mask, and leave out a last batch that is "
        "short (DataLoader(drop_last=True))."
    )


# ---- options of pjit


def specs_in_pjit(fn: str, keyword: str) -> str:
    fix = {"in_specs": "in_shardings", "out_specs": "out_shardings"}[keyword]
    return (
        f"vf.pjit({fn}): got {keyword}=, which belongs to vf.shard_map (the per-rank view). pjit has the global view: "
        f"write {fix}=."
    )


def unknown_keyword(fn: str, keyword: str, known: Sequence[str]) -> str:
    return f"vf.pjit({fn}): there is no option {keyword!r}. The options are: {one_line(known)}."


def bad_option(fn: str, keyword: str, value: object, allowed: Sequence[object]) -> str:
    return f"vf.pjit({fn}): {keyword}={value!r} is not known. It must be one of {one_line([repr(a) for a in allowed])}."


def no_such_parameter(fn: str, name: str, params: Sequence[str]) -> str:
    return f"vf.pjit({fn}): static_argnames names {name!r}, but the parameters are: {one_line(params)}."


def argnum_out_of_range(fn: str, what: str, index: int, params: Sequence[str]) -> str:
    return f"vf.pjit({fn}): {what} names argument {index}, but there are {len(params)}: {one_line(params)}."


def cannot_compile(fn: str, count: int) -> str:
    return (
        f'{fn}: compile="inductor" compiles whole programs without collectives, and this one has {count}. '
        "Leave compile out, or lower onto a mesh of one rank."
    )


# ---- rules


def not_an_operation(op: object) -> str:
    return (
        f"vf.register_rule: {op!r} is not an operation of torch.ops. "
        "Rules belong to what a trace records: pass torch.ops.<library>.<name> or one of its overloads."
    )


def replicas_differ(what: str, path: str, array: str, alone: Sequence[int], most: Sequence[int]) -> str:
    def ranks(rs: Sequence[int]) -> str:
        return f"rank{'s' if len(rs) > 1 else ''} {one_line(rs)}"

    return (
        f"{what}: the replicas of {path} ({array}) differ: {ranks(alone)} against {ranks(most)}. A step cannot do "
        "this: suspect memory or a device of the ranks that stand alone, and go back to the last checkpoint."
    )
