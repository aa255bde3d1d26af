"""Reductions. A rank that holds part of a reduced dim makes a partial result: a sum, a maximum or a minimum.

Reductions that need the whole dim (a mean, a variance, an index) keep it whole; most of them are decomposed into
sums before the rules are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.layout import Kind
from vescale_fn.sharding.rules.notation import fresh_letters
from vescale_fn.sharding.rules.registry import Entry, bound_args, make_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def reduced_dims(eqn: Eqn) -> frozenset[int]:
    """The dims that a reduction takes away. None named means all, but for any and all, to which `[]` is none."""
    dim, ndim = bound_args(eqn).get("dim"), len(eqn.operands[0].shape)
    if dim is None or (dim in ([], ()) and eqn.op not in (aten.any.dims, aten.all.dims)):
        return frozenset(range(ndim))
    return frozenset(d % ndim for d in ([dim] if isinstance(dim, int) else dim) if ndim)


def _reduction(kind: Kind | None, linear: bool = False) -> Entry:
    """Reduced dims are pending as `kind`, or must be whole (None)."""

    def entry(eqn: Eqn) -> Rule:
        (x,), reduced = eqn.operands, reduced_dims(eqn)
        letters = [a for a, _ in zip(fresh_letters(), x.shape)]
        keepdim = bound_args(eqn).get("keepdim", False)
        result = tuple(() if d in reduced else (a,) for d, a in enumerate(letters) if keepdim or d not in reduced)
        gone = [letters[d] for d in reduced]
        rule = make_rule(
            [tuple((a,) for a in letters)],
            [result] * len(eqn.outs),
            dict(zip(letters, x.shape)),
            whole=() if kind else gone,
            linear=[{0}] if linear else [],
            reduces=dict.fromkeys(gone, kind) if kind else {},
            eqn=eqn,
        )
        return replace(rule, merges="never" if keepdim else "alike")

    return entry


_SUM, _MAX, _MIN, _WHOLE = _reduction("sum"), _reduction("max"), _reduction("min"), _reduction(None)

_LINEAR_SUMS = [aten.sum.default, aten.sum.dim_IntList]
_SUMS = [
    aten.nansum.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
]
_MAXIMA = [aten.amax.default, aten.max.default, aten.any.default, aten.any.dim, aten.any.dims]
_MINIMA = [aten.amin.default, aten.min.default, aten.all.default, aten.all.dim, aten.all.dims]
_NEED_ALL = [
    aten.prod.default,
    aten.prod.dim_int,
    aten.max.dim,
    aten.min.dim,
    aten.aminmax.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.var.default,
    aten.var.dim,
    aten.var.correction,
    aten.var_mean.correction,
    aten.std.default,
    aten.std.dim,
    aten.std.correction,
    aten.std_mean.correction,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.linalg_vector_norm.default,
    aten.logsumexp.default,
]
_LINEAR_NEED_ALL = [aten.mean.default, aten.mean.dim]

ENTRIES: Mapping[Any, Entry] = {
    **dict.fromkeys(_LINEAR_SUMS, _reduction("sum", linear=True)),
    **dict.fromkeys(_SUMS, _SUM),
    **dict.fromkeys(_MAXIMA, _MAX),
    **dict.fromkeys(_MINIMA, _MIN),
    **dict.fromkeys(_NEED_ALL, _WHOLE),
    **dict.fromkeys(_LINEAR_NEED_ALL, _reduction(None, linear=True)),
}
