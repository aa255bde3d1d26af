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


def blocks_update(eqn: Eqn) -> Rule:
    """The rule of `update(params, grads, codes, scales, codes, scales, *scalars)`, which returns all lists but that of
    gradients. Scales have one entry for each block of a parameter, and nobody holds part of a block."""
    params, _, _, scales, *_ = eqn.args
    whole: list[Dims] = []  # of tensors like the parameters
    coarse: list[Dims] = []  # of scales
    sizes: dict[str, int] = {}
    for i, (param, scale) in enumerate(zip(params, scales)):
        blocks = [f"p{i}d{d}" for d in range(len(param.shape))]
        sizes |= dict(zip(blocks, scale.shape))
        sizes |= {f"{x}in": size // max(n, 1) for x, size, n in zip(blocks, param.shape, scale.shape)}
        whole.append(tuple((x, f"{x}in") for x in blocks))
        coarse.append(tuple((x,) for x in blocks))
    scalars: list[Dims] = [() for a in eqn.args if isinstance(a, Var) and a.is_tensor]
    moments = [*whole, *coarse, *whole, *coarse]
    inside = [x for x in sizes if x.endswith("in")]
    rule = make_rule([*whole, *whole, *moments, *scalars], [*whole, *moments], sizes, whole=inside)
    return replace(rule, apart=True)
