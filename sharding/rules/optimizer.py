"""Optimizer updates on lists of tensors: parameters, gradients, moments.

The i-th elements of all lists are cut alike and nothing is mixed between elements. Updates are not linear in the
gradients (moments are squared), so partial gradients are reduced first.
"""

from __future__ import annotations

from dataclasses import replace

from vescale_fn.sharding.graph import Eqn, Var
from vescale_fn.sharding.rules.registry import make_rule
from vescale_fn.sharding.rules.rule import Dims, Rule


def list_update(eqn: Eqn) -> Rule:
    """The rule of `update(params, grads, *moments, *scalars) -> [*params, *moments]`. Lists of moments may be empty;
    the others have one element per parameter."""
    params = eqn.args[0]
    letters: list[Dims] = [tuple((f"p{i}d{d}",) for d in range(len(p.shape))) for i, p in enumerate(params)]
    sizes = {x: n for dims, p in zip(letters, params) for (x,), n in zip(dims, p.shape)}
    operands: list[Dims] = []
    for arg in eqn.args:
        if isinstance(arg, (list, tuple)):
            operands += letters[: len(arg)]
        elif isinstance(arg, Var) and arg.is_tensor:
            operands.append(())
    results = letters * (len(eqn.outs) // max(len(params), 1))
    return replace(make_rule(operands, results, sizes), apart=True, merges="alike")
