"""The text of errors: what was asked, where, what exists, and the fix."""

from __future__ import annotations

from collections.abc import Sequence


def donated_array(where: str, what: str) -> str:
    return (
        f"This Array ({what}) was donated to {where or 'a call'} and holds nothing any more. "
        "Use the value that the call returned, or leave the argument out of donate_argnums."
    )


def donated_twice(first: str, second: str, fn: str) -> str:
    return (
        f"{fn}: arguments {first} and {second} are the same Array, and one of them is donated. "
        "Pass a copy (vf.device_put of it copies), or do not donate it."
    )


def needs_full(what: str) -> str:
    return (
        f"The value of this Array ({what}) is spread over ranks, and reading it here would communicate. "
        "Call .full() on every process, then read the result."
    )


def no_mesh(fn: str) -> str:
    return (
        f"{fn}: no argument is an Array and no mesh= was given, so there is no mesh to run on. "
        "Put the arguments on a mesh with vf.device_put(x, spec, mesh), or pass mesh= to vf.pjit."
    )


def two_meshes(fn: str, a: str, mesh_a: object, b: str, mesh_b: object) -> str:
    return (
        f"{fn}: argument {a} is on mesh {mesh_a} and argument {b} is on mesh {mesh_b}. "
        "All arguments of one call must be on one mesh; move one of them with vf.device_put(x, spec, mesh)."
    )


def unhashable_static(fn: str, name: str, kind: str) -> str:
    return (
        f"{fn}: static argument {name} is a {kind}, which is not hashable. Static arguments are part of the cache key: "
        "pass a hashable value (a tuple instead of a list), or make it a dynamic argument."
    )


def bad_leaf(fn: str, path: str, kind: str) -> str:
    return (
        f"{fn}: argument {path} is a {kind}. Leaves must be Arrays, tensors, numbers, strings or None; "
        "name the parameter in static_argnames if it is meant to be a constant."
    )


def specs_in_pjit(fn: str, keyword: str) -> str:
    fix = {"in_specs": "in_shardings", "out_specs": "out_shardings"}[keyword]
    return (
        f"vf.pjit({fn}): got {keyword}=, which belongs to vf.shard_map (the per-rank view). pjit has the global view: "
        f"write {fix}=."
    )


def sharding_mismatch(fn: str, path: str, has: str, wants: str) -> str:
    return (
        f"{fn}: argument {path} is an Array {has}, but in_shardings asks for {wants}. "
        "Move it first with vf.device_put(x, spec, mesh), or leave its sharding out of in_shardings."
    )


def func_over_array(name: str) -> str:
    return (
        f"torch.func.{name} was applied to an Array from outside a step. torch.func transforms plain tensors: write the "
        f"transform inside a function decorated with @vf.pjit, and call that with the Array."
    )


def one_line(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


def strided_callback(spec: str) -> str:
    return (
        f"make_array_from_callback: spec '{spec}' gives a rank several runs of one dim, which one slice cannot say. "
        "Make the Array with a contiguous spec, then move it with vf.device_put(x, spec)."
    )


def callback_shape(index: object, got: tuple[int, ...], wants: tuple[int, ...]) -> str:
    return f"make_array_from_callback: the callback returned shape {list(got)} for index {index}, which holds {list(wants)}."


def no_such_parameter(fn: str, name: str, params: Sequence[str]) -> str:
    return f"vf.pjit({fn}): static_argnames names {name!r}, but the parameters are: {one_line(params)}."


def argnum_out_of_range(fn: str, what: str, index: int, params: Sequence[str]) -> str:
    return f"vf.pjit({fn}): {what} names argument {index}, but there are {len(params)}: {one_line(params)}."


def unknown_keyword(fn: str, keyword: str) -> str:
    return f"{fn}: unknown keyword argument {keyword!r}."
