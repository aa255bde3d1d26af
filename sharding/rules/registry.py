"""How rules are written down: the notation bound to an equation, and the entries of the rule tables.

A family module is data: a mapping from operation to an entry, which is anything that makes a `Rule` of an `Eqn`.
Most are a line of notation, `form("m k, k n -> m n", linear=[{0}, {1}])`; operations whose dims depend on their
arguments have a function. `vescale_fn.sharding.rules` puts the families together.

An operand may carry its argument's name, `form("input: b !c, weight: !c -> b !c")`: such operands may be absent
(None) in a call, and `linear` and `through` may then name them instead of giving a slot.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn, op_name, vars_in
from vescale_fn.sharding.layout import Kind
from vescale_fn.sharding.rules.binding import CallShapes, bind_pattern
from vescale_fn.sharding.rules.notation import parse_pattern
from vescale_fn.sharding.rules.rule import Dims, Rule

Entry = Callable[[Eqn], Rule | None]
Slots = Iterable[int | str]  # operand slots, or names of arguments
Shapes = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]  # of the operands, of the results

# --- rules of equations -----------------------------------------------------------------------------------------


def parse_rule(
    text: str,
    eqn: Eqn | Shapes,
    *,
    linear: Iterable[Slots] = (),
    through: Slots = (),
    masked: Iterable[str] = (),
    reduces: Mapping[str, Kind] | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> Rule:
    """The rule that `text` spells (see `rule.py` for the notation), bound to the shapes of an equation.

    `eqn`: the equation, or (operand shapes, result shapes). `sizes`: of letters that the shapes leave open. Every
    tensor operand must have letters. Dims of size one become `()`: they cannot be sharded, and broadcast. Raises
    RuleError where text and shapes do not fit.

    >>> str(parse_rule("... k, k n -> ... n", ([(2, 3, 4), (4, 5)], [(2, 3, 5)]), linear=[{0}, {1}]))
    'a b k, k n -> a b n'
    >>> parse_rule("(b t) d -> b t d", ([(12, 5)], [(3, 4, 5)])).sizes
    {'d': 5, 'b': 3, 't': 4}
    """
    call = _call(eqn)
    operands, results, known = bind_pattern(text, call, tuple(sizes.items()))
    slots = dict(call.slots)
    return make_rule(
        operands,
        results,
        dict(known),
        whole=parse_pattern(text).whole,
        linear=[g for g in (_slot_set(group, slots) for group in linear) if g is not None],
        through=_slot_set(through, slots, partly=True) or (),
        masked=masked,
        reduces=reduces or {},
        eqn=eqn if isinstance(eqn, Eqn) else None,
    )


def _call(eqn: Eqn | Shapes) -> CallShapes:
    if not isinstance(eqn, Eqn):
        return CallShapes("", tuple(map(tuple, eqn[0])), tuple(map(tuple, eqn[1])))
    return CallShapes(
        op_name(eqn.op),
        tuple(v.shape for v in eqn.operands),
        tuple(v.shape for v in eqn.outs),
        tuple(operand_slots(eqn).items()),
    )


def make_rule(
    operands: Sequence[Dims],
    results: Sequence[Dims],
    sizes: Mapping[str, int],
    *,
    whole: Iterable[str] = (),
    linear: Iterable[Iterable[int]] = (),
    through: Iterable[int] = (),
    masked: Iterable[str] = (),
    reduces: Mapping[str, Kind] | None = None,
    eqn: Eqn | None = None,
) -> Rule:
    """A rule from letters, in normal form: factors of size one are dropped, and so is all that is said of letters
    that are not there. `eqn`, where given, drops groups that are not linear in the dtypes at hand."""
    keep = {x for dims in (*operands, *results) for d in dims for x in d if sizes[x] != 1}

    def kept(side: Sequence[Dims]) -> tuple[Dims, ...]:
        return tuple(tuple(tuple(x for x in d if x in keep) for d in dims) for dims in side)

    groups = (frozenset(g) for g in linear)
    return Rule(
        kept(operands),
        kept(results),
        {x: n for x, n in sizes.items() if x in keep},
        whole=frozenset(whole) & keep,
        linear=tuple(g for g in groups if eqn is None or _adds(eqn, g)),
        through=frozenset(through),
        reduces={x: k for x, k in (reduces or {}).items() if x in keep},
        masked=frozenset(masked) & keep,
    )


def _adds(eqn: Eqn, group: frozenset[int]) -> bool:
    """Whether sums survive the dtypes from `group` to the results: bool has no sums, and integers made of floats
    were rounded."""
    ins = [eqn.operands[i].dtype for i in group]
    return all(
        out.dtype is not torch.bool and (is_inexact(out.dtype) or not any(is_inexact(i) for i in ins))
        for out in eqn.outs
        if out.is_tensor
    )


def is_inexact(dtype: torch.dtype) -> bool:
    """Floating or complex."""
    return dtype.is_floating_point or dtype.is_complex


# --- arguments --------------------------------------------------------------------------------------------------


def bound_args(eqn: Eqn) -> dict[str, Any]:
    """The arguments of an equation by name, with defaults filled in. Tensors are Vars."""
    if not isinstance(eqn.op, torch._ops.OpOverload):
        bound = inspect.signature(eqn.op).bind(*eqn.args, **eqn.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)
    declared = eqn.op._schema.arguments
    given = {**{a.name: v for a, v in zip(declared, eqn.args)}, **eqn.kwargs}
    return {a.name: given.get(a.name, a.default_value) for a in declared}


def operand_slots(eqn: Eqn) -> dict[str, tuple[int, ...]]:
    """For each argument that holds tensors, its slots in `eqn.operands`."""
    names = _argument_names(eqn.op)
    given = [*zip(names, eqn.args), *eqn.kwargs.items()]
    out: dict[str, tuple[int, ...]] = {}
    start = 0
    for name, value in given:
        n = sum(v.is_tensor for v in vars_in(value))
        if n:
            out[name] = tuple(range(start, start + n))
        start += n
    return out


def _argument_names(op: Any) -> list[str]:
    if isinstance(op, torch._ops.OpOverload):
        return [a.name for a in op._schema.arguments]
    return list(inspect.signature(op).parameters) if callable(op) else []


def _slot_set(group: Slots, slots: Mapping[str, tuple[int, ...]], partly: bool = False) -> frozenset[int] | None:
    """The slots of `group`, names resolved. A name that is absent leaves its group without meaning (None), or is
    left out when `partly`."""
    out: set[int] = set()
    for g in group:
        if isinstance(g, int):
            out.add(g)
        elif g in slots:
            out.update(slots[g])
        elif not partly:
            return None
    return frozenset(out)


# --- entries ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """An entry written in notation; calling it binds it to an equation."""

    text: str
    linear: tuple[frozenset[int | str], ...] = ()
    through: frozenset[int | str] = frozenset()
    masked: frozenset[str] = frozenset()
    reduces: tuple[tuple[str, Kind], ...] = ()

    def __call__(self, eqn: Eqn) -> Rule:
        return parse_rule(
            self.text,
            eqn,
            linear=self.linear,
            through=self.through,
            masked=self.masked,
            reduces=dict(self.reduces),
        )


def form(
    text: str,
    *,
    linear: Iterable[Slots] = (),
    through: Slots = (),
    masked: Iterable[str] = (),
    reduces: Mapping[str, Kind] | None = None,
) -> Form:
    """An entry of a rule table in notation; see `Rule` for the keywords.

    >>> form("m k, k n -> m n", linear=[{0}, {1}]).text
    'm k, k n -> m n'
    """
    parse_pattern(text)
    return Form(
        text,
        tuple(frozenset(g) for g in linear),
        frozenset(through),
        frozenset(masked),
        tuple((reduces or {}).items()),
    )
