"""Elementwise operations write over an operand that nobody reads afterwards.

A new tensor costs memory, and time where no cache holds that memory yet. The result must look like the one in the
trace, so this is done only where all operands are contiguous, whatever came before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vescale_fn.liveness import sole_readers
from vescale_fn.program import Program
from vescale_fn.sharding.comm import COLLECTIVES
from vescale_fn.sharding.graph import Eqn, Var

aten = torch.ops.aten

_BINARY = "add sub mul div"
_UNARY = "neg exp log sqrt rsqrt tanh sigmoid gelu silu"
_BACKWARD = "gelu silu tanh sigmoid threshold"

# Operation -> its form that writes into a given tensor, and the name of that argument.
INTO: dict[Any, tuple[Any, str]] = {
    **{getattr(aten, n).Tensor: (getattr(aten, n).out, "out") for n in _BINARY.split()},
    **{getattr(aten, n).default: (getattr(aten, n).out, "out") for n in _UNARY.split()},
    **{
        getattr(aten, f"{n}_backward").default: (getattr(aten, f"{n}_backward").grad_input, "grad_input")
        for n in _BACKWARD.split()
    },
}

# Operations with contiguous results whatever the strides of their operands.
_PRODUCTS = "mm bmm addmm baddbmm"
_OTHERS = "native_layer_norm native_layer_norm_backward embedding embedding_dense_backward"
_CONTIGUOUS = frozenset(getattr(aten, n).default for n in f"{_PRODUCTS} {_OTHERS}".split())
# Operations that give contiguous results for contiguous operands.
_KEEPING = frozenset({*INTO, aten.view.default, aten.reshape.default, aten._unsafe_view.default})


def overwrite_operands(program: Program) -> Program:
    """The program with elementwise operations in place wherever nobody can see the difference."""
    graph = program.graph
    contiguous = _contiguous(graph.eqns)
    found = [e for e in graph.eqns if e.op in INTO and e.outs[0] in contiguous]
    sent = {v for e in graph.eqns if isinstance(e.op, COLLECTIVES) for v in e.operands}
    free = sole_readers(graph, found, frozenset())
    made_at = {v: i for i, e in enumerate(graph.eqns) for v in e.outs}

    def target(e: Eqn) -> Var | None:
        """The operand of e to overwrite: the youngest, which is in some cache. One that a collective reads may still be
        on its way."""
        fit = [v for v in e.operands if v in contiguous and v in free[e] and v not in sent]
        return max((v for v in fit if kind(v) == kind(e.outs[0])), key=made_at.__getitem__, default=None)

    def kind(v: Var) -> Any:
        return v.shape, v.dtype, program.layouts[v]

    targets = {e: v for e in found if (v := target(e)) is not None}
    eqns = tuple(_into(e, targets[e]) if e in targets else e for e in graph.eqns)
    return replace(program, graph=replace(graph, eqns=eqns))


def _into(e: Eqn, v: Var) -> Eqn:
    op, name = INTO[e.op]
    return replace(e, op=op, kwargs={**e.kwargs, name: v})


def _contiguous(eqns: tuple[Eqn, ...]) -> set[Var]:
    """Values that are contiguous on every rank, as far as the operations that make them tell."""
    known: set[Var] = set()
    for e in eqns:
        if e.op in _CONTIGUOUS or isinstance(e.op, COLLECTIVES) or (e.op in _KEEPING and _decided(e, known)):
            known.update(e.outs)
    return known


def _decided(e: Eqn, known: set[Var]) -> bool:
    """Whether operands known to be contiguous decide the strides of the result: all of them, or the first one."""
    return all(v in known or not v.shape for v in e.operands) or (
        e.operands[0] in known and e.operands[0].shape == e.outs[0].shape
    )
