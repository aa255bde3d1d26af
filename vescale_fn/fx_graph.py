"""From torch.fx to `Graph`: list results flattened, copies and dead code dropped, readable names."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from vescale_fn.dead_code import drop_dead
from vescale_fn.effects import EFFECTS
from vescale_fn.functional import SubProgram
from vescale_fn.names import Names, identifier
from vescale_fn.sharding.graph import Eqn, Graph, Source, Var, has_effect, vars_in

aten = torch.ops.aten

# Results that are their first operand, once nothing is written in place.
_SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift_fresh_copy.default}

# What reads only the shape of its operand, and the number that it fills the result with: factories, and what is left of
# writes that overwrite the whole tensor. As they are they would tie the layout of the result to a tensor never read.
FILLS: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys(
        [
            aten.zero.default,
            aten.zeros.default,
            aten.zeros_like.default,
            aten.new_zeros.default,
            aten.empty_like.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        ],
        lambda args: 0,
    ),
    **dict.fromkeys([aten.ones.default, aten.ones_like.default, aten.new_ones.default], lambda args: 1),
    **dict.fromkeys([aten.fill.Scalar, aten.full_like.default], lambda args: args[1]),
    aten.new_full.default: lambda args: args[2],
}


def graph_of_fx(gm: GraphModule, names: Sequence[str]) -> Graph:
    """The Graph of a module that make_fx traced and that writes nothing in place. Every call node carries
    meta["source"] and meta["backward"].

    names: one for each placeholder of gm, in order.
    """
    return _Converter(gm).convert(names)


@dataclass(eq=False)
class _Converter:
    gm: GraphModule
    names: Names = field(default_factory=Names)
    values: dict[Node, Any] = field(default_factory=dict)  # Var, nested results, or a constant
    eqns: list[Eqn] = field(default_factory=list)
    backward: set[Eqn] = field(default_factory=set)

    def convert(self, names: Sequence[str]) -> Graph:
        given = iter(names)
        inputs: list[Var] = []
        outputs: tuple[Any, ...] = ()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.result(identifier(next(given)), node.meta["val"])
                inputs.append(self.values[node])
            elif node.op == "output":
                outputs = tuple(self.argument(node.args[0]))
            elif node.op == "get_attr":
                number = getattr(self.gm, node.target)  # a tensor of one element, made by torch.tensor(2.0)
                self.values[node] = self.full("constant", number, number.item(), node.meta)
            elif node.users or _has_effect(node):
                self.values[node] = self.call(node)
        return drop_dead(Graph(tuple(inputs), tuple(with_phases(self.eqns, self.backward)), outputs))

    def argument(self, tree: Any) -> Any:
        """Arguments of a node with Vars for nodes."""
        if isinstance(tree, Node):
            return self.values[tree]
        if isinstance(tree, (tuple, list)):
            return type(tree)(map(self.argument, tree)) if type(tree) in (tuple, list) else [*map(self.argument, tree)]
        if isinstance(tree, dict):
            return {k: self.argument(v) for k, v in tree.items()}
        return tree

    def result(self, base: str, val: Any) -> Any:
        """New Vars in the structure of a node's value."""
        if isinstance(val, torch.Tensor):
            return Var(self.names.fresh(base), tuple(val.shape), val.dtype)
        if isinstance(val, (tuple, list)):
            return tuple(self.result(base, v) for v in val)
        kinds = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}
        return Var(self.names.fresh(base), (), kinds.get(type(val), type(val)))

    def call(self, node: Node) -> Any:
        args, kwargs = self.argument(node.args), self.argument(node.kwargs)
        if node.target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]
        if _is_copy(node):
            return args[0]
        name, val = re.sub(r"_\d+$", "", node.name), node.meta.get("val", ())
        if node.target in FILLS:
            return self.full(name, val, FILLS[node.target](args), node.meta)
        if node.target is aten.copy.default:
            return self.copied(args[1], val, node.meta)
        op = node.target.op if isinstance(node.target, SubProgram) else node.target
        return self.emit(op, args, kwargs, name, val, node.meta)

    def full(self, name: str, val: torch.Tensor, value: Any, meta: Mapping[str, Any]) -> Any:
        kwargs = {"dtype": val.dtype, "device": val.device}
        return self.emit(aten.full.default, (tuple(val.shape), value), kwargs, name, val, meta)

    def copied(self, source: Var, val: torch.Tensor, meta: Mapping[str, Any]) -> Any:
        """`source` in the shape and dtype of the tensor that it was copied into."""
        if source.shape != tuple(val.shape):
            shaped = val.new_empty(val.shape, dtype=source.dtype)
            source = self.emit(aten.expand.default, (source, list(val.shape)), {}, "expand", shaped, meta)
        if source.dtype != val.dtype:
            source = self.emit(aten._to_copy.default, (source,), {"dtype": val.dtype}, "cast", val, meta)
        return source

    def emit(self, op: Any, args: Any, kwargs: Any, name: str, val: Any, meta: Mapping[str, Any]) -> Any:
        result = self.result(name, val)
        eqn = Eqn(op, tuple(args), dict(kwargs), tuple(vars_in(result)), meta.get("source", Source()))
        self.eqns.append(eqn)
        if meta.get("backward"):
            self.backward.add(eqn)
        return result


def _has_effect(node: Node) -> bool:
    """Whether a node is to stay though nobody reads its results."""
    if isinstance(node.target, SubProgram):
        return any(map(has_effect, node.target.op.body.eqns))
    return node.target in EFFECTS


def _is_copy(node: Node) -> bool:
    """The result is the first operand, strides included."""
    if node.target is aten.clone.default:
        before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return bool(before.stride() == after.stride())
    return node.target in _SAME_VALUE


def with_phases(eqns: Sequence[Eqn], backward: set[Eqn]) -> list[Eqn]:
    """forward, backward, and update: what comes after the last backward equation."""
    last = max((i for i, e in enumerate(eqns) if e in backward), default=len(eqns))
    phases = ["backward" if e in backward else "update" if i > last else "forward" for i, e in enumerate(eqns)]
    return [replace(e, phase=p) for e, p in zip(eqns, phases)]
