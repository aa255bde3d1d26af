"""The first rewriting of a traced graph: operations that read only a tensor's metadata lose that operand.

`zeros_like(logits)` needs no logits; left as it is, it would tie the layout of its result to a tensor it never reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vescale_fn.sharding.graph import Call, Eqn, Graph, Scan

aten = torch.ops.aten

_FILLED: dict[Any, Any] = {
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.empty_like.default: 0,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.new_empty_strided.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 1,
}


_FACTORIES = {*_FILLED, aten.full_like.default, aten.new_full.default}


def _filled(e: Eqn) -> Eqn:
    value = _FILLED[e.op] if e.op in _FILLED else e.args[-1]
    out = e.outs[0]
    kwargs = {"dtype": out.dtype, "device": e.kwargs.get("device") or torch.device("cpu")}
    return replace(e, op=aten.full.default, args=(out.shape, value), kwargs=kwargs)


def drop_metadata_reads(graph: Graph) -> Graph:
    """Factories that take their shape from a tensor become `full`, in sub-programs too."""
    return replace(graph, eqns=tuple(map(_without_metadata_reads, graph.eqns)))


def _without_metadata_reads(e: Eqn) -> Eqn:
    if isinstance(e.op, (Scan, Call)):
        return replace(e, op=replace(e.op, body=drop_metadata_reads(e.op.body)))
    return _filled(e) if e.op in _FACTORIES else e
