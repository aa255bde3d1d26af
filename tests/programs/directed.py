"""Programs around one operation, in which its tensors lie as one of the cases of its rule says.

A random program meets a rare operation seldom, and hardly ever with a partial sum at hand. Here the samples of the rule
machine are statements of a step, one for each case: what a case shards, the inputs' specs shard; what it has partial
is a sum over a sharded dim, so that no rank holds the value; the results are asked for as the case says. A gradient
that arrives partial is made by a product with something sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from case_layouts import layout_of
from op_samples import Sample, T
from rule_machine import Case, cases, equation

from programs.program import Input, Program
from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import MeshShape
from vescale_fn.sharding.rules import rule_for
from vescale_fn.sharding.rules.rule import Rule
from vescale_fn.sharding.unbind import spec_of

AXES = ("x", "y", "z")
_REDUCTION = {"sum": "sum", "max": "amax", "min": "amin"}
_PLACES = {
    "step": "{call}",
    "call": "vf.call(lambda {names}: {call}, {names})",
    "remat": "vf.call(lambda {names}: {call}, {names}, remat=True)",
}


@dataclass(frozen=True, eq=False)
class Statement:
    """A sample, its equation and rule, and how its tensors lie."""

    sample: Sample
    eqn: Eqn
    rule: Rule
    case: Case

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(AXES[: len(self.case.sizes)], self.case.sizes)

    def operand(self, slot: int) -> Layout:
        return layout_of(self.mesh, self.rule, self.case, self.eqn.operands[slot], self.rule.operands[slot], slot)

    def result(self, i: int) -> Layout:
        return layout_of(self.mesh, self.rule, self.case, self.eqn.outs[i], self.rule.results[i])

    @property
    def layouts(self) -> list[Layout]:
        """Of operands and results."""
        results = [self.result(i) for i, v in enumerate(self.eqn.outs) if v.is_tensor]
        return [*(self.operand(i) for i, _ in enumerate(self.eqn.operands)), *results]

    @property
    def made_of_nothing(self) -> bool:
        """Whether the results are partial, and no operand is: zeros."""
        return any(not c.letter and not c.partial for c in self.case.choices)

    def partial(self, slot: int) -> dict[str, str]:
        """The axes on which an operand is partial, and how."""
        return dict(self.operand(slot).partial)


def statements(sample: Sample, meshes: Sequence[tuple[int, ...]]) -> Iterator[Statement]:
    """One for each case that the rule of a sample admits."""
    eqn = equation(sample)
    rule = rule_for(eqn)
    if rule is not None:
        for case in cases(eqn, rule, True, meshes):
            yield Statement(sample, eqn, rule, case)


@dataclass
class _Writer:
    """A program in the making."""

    mesh: MeshShape
    order: int
    place: str
    inputs: list[Input] = field(default_factory=list)
    specs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    returns: list[str] = field(default_factory=list)
    made: int = 0

    def input(self, like: T, spec: str, lead: int = 0) -> str:
        """A new input, with a dim of size `lead` in front."""
        shape = (lead, *like.shape) if lead else like.shape
        kind = {torch.float64: "f", torch.bool: "b", torch.complex128: "c"}.get(like.dtype, "i")
        form = "unit" if like.unit else type(like).__name__.lower().removeprefix("t")
        self.inputs.append(Input(kind, shape, like.high, like.low, form))
        self.specs.append(spec)
        return f"x{len(self.inputs) - 1}"

    def value(self, text: str) -> str:
        self.lines.append(f"v{self.made} = {text}")
        self.made += 1
        return f"v{self.made - 1}"

    # --- operands -----------------------------------------------------------------------------------------------

    def operand(self, s: Statement, slot: int, like: T) -> str:
        partial, layout = s.partial(slot), s.operand(slot)
        if not partial:
            return self.input(like, str(spec_of(layout)))
        if self.order:  # its gradient is what is partial
            return self.value(f"vf.reshard({self.input(like, _whole(layout))}, {_pending(layout, 'ct')!r})")
        return self.pending(like, layout)

    def pending(self, like: T, layout: Layout) -> str:
        """A value of which no rank that is partial in this layout holds all."""
        partial = dict(layout.partial)
        (kind,) = set(partial.values())
        n = math.prod(self.mesh[a] for a in partial)
        x = self.input(like, f"p/{_together(partial)} {_whole(layout)}".strip(), lead=n)
        text = f"{x}.{'any' if like.dtype is torch.bool else _REDUCTION[kind]}(0)"
        return self.value(f"vf.reshard({text}, {str(spec_of(layout))!r})")

    # --- the operation and what becomes of it -------------------------------------------------------------------

    def write(self, s: Statement) -> None:
        names: list[str] = []

        def text(x: Any) -> str:
            if isinstance(x, T):
                names.append(self.operand(s, len(names), x))
                return names[-1]
            if isinstance(x, (tuple, list)):
                return f"[{', '.join(map(text, x))}]"
            return repr(x)

        args = [text(x) for x in s.sample.args] + [f"{k}={text(x)}" for k, x in s.sample.kwargs.items()]
        call = f"torch.ops.{s.sample.op}({', '.join(args)})"
        place = _PLACES[self.place if names else "step"]
        call = place.format(call=call, names=", ".join(dict.fromkeys(names)))
        several = s.sample.returns_several
        made = self.value(f"tuple({call})" if several else call)
        for i, v in enumerate(s.eqn.outs):
            if v.is_tensor:
                self.result(s, i, f"{made}[{i}]" if several else made, v.dtype)

    def result(self, s: Statement, i: int, name: str, dtype: torch.dtype) -> None:
        layout = s.result(i)
        if s.made_of_nothing:  # which is pending only to meet something that is
            name = f"{name} + {self.pending(T(layout.shape, dtype), layout)}"
        late = [a for a, c in zip(self.mesh.names, s.case.choices) if not c.letter and a in dict(layout.partial)]
        if self.order and late:
            if not (dtype.is_floating_point or dtype.is_complex):
                return
            n = math.prod(self.mesh[a] for a in late)
            weights = self.input(T(layout.shape), f"p/{_together(late)} {_whole(layout)}".strip(), lead=n)
            pending = f"vf.reshard({name}, {_pending(layout, 'ct')!r})" if dtype.is_floating_point else name
            name = f"{pending}[None] * {weights}"
        else:
            name = f"vf.reshard({name}, {str(spec_of(layout))!r})"
        self.returns.append(self.value(name))


def _whole(layout: Layout) -> str:
    """The spec of a layout without what is pending."""
    pending = dict(layout.partial)
    kept = {a: s for a, s in zip(layout.mesh.names, layout.states) if a not in pending}
    return str(spec_of(Layout.of(layout.mesh, layout.shape, kept)))


def _pending(layout: Layout, kind: str) -> str:
    """The spec of a layout in which what is pending is so in another way."""
    return f"{_whole(layout)} {{{kind}: {_together(dict(layout.partial))}}}".strip()


def _together(axes: Mapping[str, str] | Sequence[str]) -> str:
    names = list(axes)
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def directed(parts: Sequence[Statement], order: int = 0, place: str = "step", **how: Any) -> Program:
    """The program of statements on one mesh. order: of differentiation; place: in the step, in a call, or in one that
    is rematerialised; how: fields of Program."""
    mesh = parts[0].mesh
    writer = _Writer(mesh, order, place)
    for s in parts:
        writer.write(s)
    floats = [x for x in writer.inputs if x.kind == "f"]
    results = len(floats) if order else len(writer.returns)
    return Program(
        lines=writer.lines,
        returns=writer.returns,
        inputs=writer.inputs,
        specs=writer.specs,
        mesh=dict(zip(mesh.names, mesh.sizes)),
        parameters=[f"x{i}" for i, _ in enumerate(writer.inputs)],
        result=f"({', '.join(f'y{i}' for i in range(results))},)",
        order=order,
        outs=[None] * results,
        **how,
    )
