"""Linear algebra on batches of matrices: the matrices are whole, the batch is free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry, bound_args, form, parse_rule
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.rules.view import letters

aten = torch.ops.aten


def _cross(eqn: Eqn) -> Rule:
    """The product of vectors along `dim`, which broadcasts over the others."""
    rank = len(eqn.outs[0].shape)
    d, x = bound_args(eqn)["dim"] % rank, letters(rank)
    dims = " ".join([*x[:d], f"!{x[d]}", *x[d + 1 :]])
    return parse_rule(f"{dims}, {dims} -> {dims}", eqn, linear=[{0}, {1}])


def _solve_triangular(eqn: Eqn) -> Rule:
    """AX = B solves each column alone, XA = B each row."""
    sides = "... !b c" if bound_args(eqn)["left"] else "... c !b"
    return parse_rule(f"... !m !n, {sides} -> {sides}", eqn, linear=[{1}])


def _solve(eqn: Eqn) -> Rule:
    """The solution for a matrix or a vector, and how the system was factored, which is the same for each column."""
    vector = len(eqn.operands[1].shape) < len(eqn.operands[0].shape)
    side = "... !b" if vector else "... !b !c"
    return parse_rule(f"... !m !n, {side} -> {side}, ... !m !n, ... !pivot, ...", eqn)


ENTRIES: Mapping[Any, Entry] = {
    aten.linalg_cross.default: _cross,
    aten._linalg_det.default: form("... !m !n -> ..., ... !m !n, ... !pivot"),
    aten._linalg_slogdet.default: form("... !m !n -> ..., ..., ... !m !n, ... !pivot"),
    aten.linalg_inv_ex.default: form("... !m !n -> ... !m !n, ..."),
    aten.linalg_cholesky_ex.default: form("... !m !n -> ... !m !n, ..."),
    aten.linalg_lu_factor_ex.default: form("... !m !n -> ... !m !n, ... !pivot, ..."),
    aten.linalg_qr.default: form("... !m !n -> ... !m !q, ... !r !n"),
    aten.linalg_eig.default: form("... !m !n -> ... !value, ... !m !n"),
    aten._linalg_eigh.default: form("... !m !n -> ... !value, ... !m !n"),
    aten._linalg_svd.default: form("... !m !n -> ... !m !u, ... !value, ... !v !n"),
    aten.linalg_lu.default: form("... !m !n -> ... !p !q, ... !l !k, ... !r !u"),
    aten.linalg_matrix_exp.default: form("... !m !n -> ... !m !n"),
    aten.trace.default: form("!m !n -> ", linear=[{0}]),
    aten._linalg_solve_ex.default: _solve,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.cholesky_solve.default: form("... !b c, ... !m !n -> ... !b c", linear=[{0}]),
    aten._cdist_forward.default: form("... m !d, ... n !d -> ... m n"),
    aten._cdist_backward.default: form("... m n, ... m d, ... n d, ... m n -> ... m d", linear=[{0}]),
}
