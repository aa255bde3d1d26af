"""From the arguments of a call to what the lowering needs: layouts of inputs and outputs, roles, donation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale_fn import errors, trace_errors
from vescale_fn.arguments import CallArguments, Shardings, Signature, leaf_key, unwrap_static
from vescale_fn.array import Array
from vescale_fn.continuation import OutputLeaf, continued
from vescale_fn.decompositions import ALWAYS
from vescale_fn.lowered import Request
from vescale_fn.primitives import RESHARD
from vescale_fn.sharding.graph import Graph, Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.sharding.spec import Spec
from vescale_fn.shardings import NamedSharding, layouts_for
from vescale_fn.trace import trace_flat
from vescale_fn.tracing import Aval, ShapeDtype, Traced
from vescale_fn.tree import flatten, unflatten


@dataclass(frozen=True, eq=False)
class Staged:
    """A traced call: `dynamic` are the argument leaves that became inputs of the graph, in order."""

    traced: Traced
    dynamic: tuple[int, ...]
    out_treedef: Any


def trace_call(signature: Signature, shardings: Shardings, call: CallArguments) -> Staged:
    """Trace the function on the types of the call's leaves. Plain tensors count as being on the mesh."""
    mesh = mesh_of(signature, shardings, call)
    dynamic = tuple(i for i, x in enumerate(call.leaves) if not isinstance(leaf_key(x), tuple))
    out: dict[str, Any] = {}

    def flat_fn(*values: Any) -> list[Any]:
        leaves = [unwrap_static(x) for x in call.leaves]
        for i, v in zip(dynamic, values, strict=True):
            leaves[i] = v
        args, kwargs = unflatten(call.treedef, leaves)
        results, out["treedef"] = flatten(signature.fn(*args, **kwargs))
        for k, x in enumerate(results):
            if type(x).__hash__ is None:  # a set, an ndarray: neither a tensor nor a constant
                raise TypeError(trace_errors.bad_output(signature.name, k, type(x).__name__))
        return results

    device = mesh.device_of(0) if mesh is not None else None
    avals = [_aval(call.leaves[i], device) for i in dynamic]
    came = _shardings(signature, shardings, call, mesh)
    traced = trace_flat(
        flat_fn,
        avals,
        names=[call.paths[i] for i in dynamic],
        fn_name=signature.name,
        decompositions=ALWAYS,
        mesh=mesh,
        shardings=[came[i] for i in dynamic],
    )
    return Staged(traced, dynamic, out["treedef"])


def shapes_of_results(signature: Signature, shardings: Shardings, call: CallArguments) -> Any:
    """The tree that a call would return, tensors as `ShapeDtype`, numbers that are computed as their types."""
    staged = trace_call(signature, shardings, call)
    found = [
        x if not isinstance(x, Var) else ShapeDtype(x.shape, x.dtype) if x.is_tensor else x.dtype
        for x in staged.traced.graph.outputs
    ]
    return unflatten(staged.out_treedef, found)


def _shardings(
    signature: Signature, shardings: Shardings, call: CallArguments, mesh: Mesh | None
) -> list[NamedSharding | None]:
    """Where each leaf lives, as far as the call says it."""
    asked = [None] * len(call.leaves) if mesh is None else _asked(signature, shardings, call, mesh)
    named = [None if a is None or mesh is None else NamedSharding(mesh, a[1]) for a in asked]
    return [x.sharding if isinstance(x, Array) else a for x, a in zip(call.leaves, named)]


def _aval(x: Any, device: str | None) -> Aval | float:
    return x if isinstance(x, float) else Aval(tuple(x.shape), x.dtype, device or str(x.device))


def request_of(
    signature: Signature, shardings: Shardings, call: CallArguments, staged: Staged, rules: dict[Any, Any]
) -> Request:
    """What the traced call is lowered for."""
    mesh = mesh_of(signature, shardings, call, staged.traced.captured)
    if mesh is None:
        raise ValueError(errors.no_mesh(signature.name))
    fixed = _input_layouts(signature, shardings, call, staged, mesh)
    captured = tuple(x.layout if isinstance(x, Array) else None for x in staged.traced.captured)
    continues = _continues(signature, call, staged)
    outputs = _output_layouts(signature.name, shardings, staged, continues, fixed, mesh)
    roles = _roles(signature, call, staged, frozenset(continues.values()))
    donated = frozenset(k for k, i in enumerate(staged.dynamic) if call.tops[i] in signature.donated)
    return Request(mesh, (*fixed, *captured), outputs, (*roles, *["state"] * len(captured)), continues, donated, rules)


def mesh_of(
    signature: Signature, shardings: Shardings, call: CallArguments, captured: Sequence[Any] = ()
) -> Mesh | None:
    """The one mesh of a call, None when nothing says it. Raises ValueError when there are two."""
    stated = [("mesh=", shardings.mesh)] if shardings.mesh is not None else []
    asked = [("in_shardings", shardings.inputs), ("out_shardings", shardings.outputs)]
    stated += [(what, x.mesh) for what, tree in asked for x in flatten(tree)[0] if isinstance(x, NamedSharding)]
    stated += [(f"argument {p}", x.mesh) for p, x in zip(call.paths, call.leaves) if isinstance(x, Array)]
    stated += [("an Array that it captures", x.mesh) for x in captured if isinstance(x, Array)]
    if not stated:
        return None
    first, mesh = stated[0]
    for what, other in stated[1:]:
        if other != mesh:
            raise ValueError(errors.two_meshes(signature.name, first, _mesh_text(mesh), what, _mesh_text(other)))
    return mesh


def _mesh_text(mesh: Mesh) -> str:
    return f"{mesh} ({mesh.kind})"


def _input_layouts(
    signature: Signature, shardings: Shardings, call: CallArguments, staged: Staged, mesh: Mesh
) -> tuple[Layout | None, ...]:
    """Layout of each dynamic leaf: the Array's own, else what in_shardings says, else the solver's choice."""
    own = [x.layout if isinstance(x, Array) else None for x in call.leaves]
    for i, asked in enumerate(_asked(signature, shardings, call, mesh)):
        if asked is None:
            continue
        layout, spec = asked
        x = call.leaves[i]
        if isinstance(x, Array) and x.layout != layout:
            has = x.type.text(x.spec)
            raise ValueError(errors.sharding_mismatch(signature.name, call.paths[i], has, f"'{spec}'"))
        own[i] = layout
    return tuple(own[i] for i in staged.dynamic)


def _asked(
    signature: Signature, shardings: Shardings, call: CallArguments, mesh: Mesh
) -> list[tuple[Layout, Spec] | None]:
    """What in_shardings says of each leaf."""
    if shardings.inputs is None:
        return [None] * len(call.leaves)
    what = f"{signature.name}: in_shardings"
    found = layouts_for(_by_parameter(signature.name, shardings.inputs, call), call.trees, mesh, what=what)
    return [None if spec is None else (layout, spec) for layout, spec in found]


def _by_parameter(fn: str, inputs: Any, call: CallArguments) -> Any:
    """in_shardings with the names of the parameters in the place of positions. One spec, or rules, stand for all."""
    if type(inputs) not in (tuple, list):
        return inputs
    params = list(call.trees)
    if len(inputs) != len(params):
        raise ValueError(errors.shardings_count(fn, len(inputs), params))
    return dict(zip(params, inputs))


def _out_avals(staged: Staged) -> list[OutputLeaf]:
    return [
        OutputLeaf((v.shape, v.dtype) if isinstance(v, Var) and v.is_tensor else None)
        for v in staged.traced.graph.outputs
    ]


def _continues(signature: Signature, call: CallArguments, staged: Staged) -> dict[int, int]:
    """Output leaf -> graph input that it continues."""
    order = sorted(dict.fromkeys(call.tops), key=lambda t: t not in signature.donated)  # donated first, then in order
    groups = [call.of_top(t) for t in order]
    arguments = [
        [(call.paths[i].removeprefix(t).removeprefix("."), _leaf_aval(call.leaves[i])) for i in group]
        for t, group in zip(order, groups)
    ]
    found = continued(unflatten(staged.out_treedef, _out_avals(staged)), arguments)
    position, placed = {leaf: k for k, leaf in enumerate(staged.dynamic)}, _placed(staged.traced.graph)
    pairs = {o: groups[a][k] for o, (a, k) in found.items() if o not in placed}
    return {o: position[leaf] for o, leaf in pairs.items() if leaf in position}


def _placed(graph: Graph) -> set[int]:
    """Outputs whose layout the step itself states, with vf.reshard."""
    stated = {e.outs[0] for e in graph.eqns if e.op is RESHARD}
    return {o for o, v in enumerate(graph.outputs) if isinstance(v, Var) and v in stated}


def _leaf_aval(x: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(x.shape), x.dtype) if isinstance(x, (Array, torch.Tensor, ShapeDtype)) else None


def _output_layouts(
    name: str,
    shardings: Shardings,
    staged: Staged,
    continues: dict[int, int],
    fixed: Sequence[Layout | None],
    mesh: Mesh,
) -> tuple[Layout | None, ...]:
    outputs: list[Layout | None] = [None] * len(staged.traced.graph.outputs)
    for o, i in continues.items():
        outputs[o] = fixed[i]
    if shardings.outputs is not None:
        what = f"{name}: out_shardings"
        avals = [
            torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, Var) and v.is_tensor else None
            for v in staged.traced.graph.outputs
        ]
        asked = layouts_for(shardings.outputs, unflatten(staged.out_treedef, avals), mesh, what=what)
        outputs = [layout if spec is not None else old for (layout, spec), old in zip(asked, outputs)]
    return tuple(outputs)


def _roles(
    signature: Signature, call: CallArguments, staged: Staged, continued_inputs: frozenset[int]
) -> tuple[str, ...]:
    """With several arguments the first is state and the others data; leaves that continue an output are state;
    data_argnums overrides both."""
    tops = list(dict.fromkeys(call.tops))
    data = signature.data if signature.data is not None else frozenset(tops[1:] if len(tops) > 1 else tops)
    roles = []
    for k, leaf in enumerate(staged.dynamic):
        is_data = call.tops[leaf] in data and (signature.data is not None or k not in continued_inputs)
        roles.append("data" if is_data else "state")
    return tuple(roles)
