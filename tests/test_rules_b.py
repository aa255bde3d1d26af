"""Rules of norms, attention, convolution, indexing and order, run through the same handlers as the product uses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_samples import Sample
from op_samples_b import SAMPLES
from rule_machine import DEFAULT_HOOKS, LocalCall, check, equation

from vescale_fn.localize import HANDLERS, Builder, Context
from vescale_fn.program import bind
from vescale_fn.sharding.graph import Var, map_vars
from vescale_fn.sharding.layout import Layout, Partial, Shard, State
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.rules import attention, conv, index, norm, order, rule_for
from vescale_fn.sharding.rules.rule import Dims

AXES = ("x", "y")


def layout_of(call: LocalCall, slot: int, dims: Dims, shape: tuple[int, ...], is_result: bool) -> Layout:
    """The layout that a case of the machine gives a tensor."""
    mesh = MeshShape(AXES[: len(call.case.sizes)], call.case.sizes)
    states: dict[str, State] = {}
    for i, choice in enumerate(call.case.choices):
        if choice.letter:
            for d, letters in enumerate(dims):
                if choice.letter in letters:
                    states[AXES[i]] = _cut(call, i, d, letters)
        elif is_result or slot in choice.partial:
            states[AXES[i]] = Partial(choice.kind)
    return Layout.of(mesh, shape, states)


def _cut(call: LocalCall, axis: int, dim: int, letters: tuple[str, ...]) -> Shard:
    letter, sizes = call.case.choices[axis].letter, call.rule.sizes
    axes = call.case.axes_of(letter)
    major = math.prod(call.case.sizes[i] for i in axes if i < axis)
    even = sizes[letter] % math.prod(call.case.sizes[i] for i in axes) == 0
    before = math.prod(sizes[x] for x in letters[: letters.index(letter)])
    return Shard(dim, before * major, 0 if even else sizes[letter])


def run_handler(call: LocalCall) -> Any:
    """One rank of an equation, rewritten by its handler as in a program."""
    eqn, rule = call.eqn, call.rule
    ins = tuple(layout_of(call, i, rule.operands[i], v.shape, False) for i, v in enumerate(eqn.operands))
    outs = tuple(layout_of(call, -1, rule.results[i], v.shape, True) for i, v in enumerate(eqn.outs))
    letters = {AXES[i]: c.letter for i, c in enumerate(call.case.choices) if c.letter}
    builder = Builder({}, set())
    handler = HANDLERS.get(eqn.op)
    if handler is None:
        return eqn.op(*call.args, **call.kwargs)
    values: dict[Var, Any] = {}

    def name(tensor: torch.Tensor) -> Var:
        v = Var(f"v{len(values)}", tuple(tensor.shape), tensor.dtype)
        values[v] = tensor
        return v

    args, kwargs = _map(call.args, name), _map(call.kwargs, name)
    results = handler(Context(builder, eqn, rule, ins, outs, letters), args, kwargs)
    coords = dict(zip(AXES, call.coord))
    for local in builder.eqns:
        given = map_vars((local.args, local.kwargs), values.__getitem__)
        out = local.op(*bind(given[0], ins[0].mesh, coords), **bind(given[1], ins[0].mesh, coords))
        values.update(zip(local.outs, out if isinstance(out, (tuple, list)) else [out]))
    return [values[v] for v in results]


def _map(tree: Any, fn: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(x, fn) for x in tree)
    return {k: _map(v, fn) for k, v in tree.items()} if isinstance(tree, dict) else tree


HOOKS = {**DEFAULT_HOOKS, **{sample.op: run_handler for sample in SAMPLES}}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_sharding_a_rule_admits_gives_the_whole_result(sample: Sample) -> None:
    rule = rule_for(equation(sample))
    assert rule is not None
    check(sample, rule, HOOKS)


def test_every_operation_with_a_rule_has_a_sample() -> None:
    families = (norm, order, index, attention, conv)
    without = {op for family in families for op in family.ENTRIES} - {sample.op for sample in SAMPLES}
    assert {op for op in without if "_for_cpu" in str(op) or "dot_product" not in str(op)} == set()
