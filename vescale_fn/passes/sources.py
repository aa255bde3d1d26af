"""What a program can gather before it has computed anything: its inputs, and casts and views of them."""

from __future__ import annotations

import torch

from vescale_fn.sharding.graph import Eqn, Graph, Var, is_view

_TO = torch.ops.aten._to_copy.default


def prepared(graph: Graph) -> dict[Var, tuple[Eqn, ...]]:
    """Inputs, and casts and views of one input, with the equations that make them from it."""
    found: dict[Var, tuple[Eqn, ...]] = dict.fromkeys(graph.inputs, ())
    for e in graph.eqns:
        if (e.op is _TO or is_view(e)) and len(e.reads) == 1 and e.reads[0] in found:
            found.update(dict.fromkeys(e.outs, (*found[e.reads[0]], e)))
    return found
