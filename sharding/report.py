"""What the user should know about a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vescale_fn.sharding.choice import AxisProblem, Choice
from vescale_fn.sharding.graph import Eqn, Var, is_view, op_name
from vescale_fn.sharding.layout import CUTS, WHOLE
from vescale_fn.sharding.problem import Node, Problem
from vescale_fn.sharding.work import is_heavy

Solved = Mapping[str, tuple[AxisProblem, Choice]]


def messages(problem: Problem, solved: Solved) -> tuple[str, ...]:
    """Gathers of what the user sharded, heavy operations that every rank repeats, operations without a rule."""
    found = [
        m for axis, (p, choice) in solved.items() for m in (*_gathers(p, choice, axis), *_repeated(p, choice, axis))
    ]
    return tuple(dict.fromkeys([*found, *_without_rule(problem, solved)]))


def _gathers(p: AxisProblem, choice: Choice, axis: str) -> Iterator[str]:
    for v, given in _as_given(p, axis).items():
        state = p.made(choice, v)
        if not isinstance(state, CUTS) or (state, WHOLE) not in p.conversions(choice, v):
            continue
        user = next((u for u, i in p.problem.users[v] if p.chosen(choice, u).operands[i] == WHOLE), None)
        if user is not None:
            yield f"{given} is gathered along {axis}: {_reason(p, choice, user)}."


def _as_given(p: AxisProblem, axis: str) -> dict[Var, Var]:
    """Inputs that the user sharded on an axis, and views of them: value -> the input that it shows."""
    out: dict[Var, Var] = {}
    for node in p.problem.nodes:
        if node.layout is not None and not node.operands and isinstance(node.layout[axis], CUTS):
            out.update((v, v) for v in node.results)
        elif node.operands and node.operands[0] in out and node.eqn is not None and is_view(node.eqn):
            out.update((v, out[node.operands[0]]) for v in node.results)
    return out


def _reason(p: AxisProblem, choice: Choice, user: Node) -> str:
    while user.eqn and is_view(user.eqn) and _can_split(p, user) and user.results[0] in p.problem.users:
        user = p.problem.users[user.results[0]][0][0]  # what the view is for
    if user.eqn is None:
        return "the step returns it whole"
    if user.layout is not None:
        return f"the constraint at {user.eqn.source} asks for it whole"
    if user.eqn in p.problem.regions.boundary:
        return (
            f"the region at {user.eqn.source} takes it whole; pass it as an argument, with an in_spec that shards it, "
            "to keep it in parts"
        )
    where = f"{op_name(user.eqn.op)} at {user.eqn.source}"
    if user.rule is None:
        return f"{where} has no rule"
    if p.chosen(choice, user).letter:
        return f"{where} works on parts of its other operands"
    other = next((s for s in p.strategies[user] if s.letter), None)
    return f"{where} cannot work on parts of it" if other is None else f"for {where} that is cheaper than {other}"


def _can_split(p: AxisProblem, node: Node) -> bool:
    return any(s.letter for s in p.strategies[node])


def _repeated(p: AxisProblem, choice: Choice, axis: str) -> Iterator[str]:
    for node in p.problem.nodes:
        if node.eqn is None or not is_heavy(node.eqn) or p.chosen(choice, node).letter:
            continue
        cut = next((w for v in node.operands if (w := _sharded_origin(p, choice, v)) is not None), None)
        if cut is not None:
            yield (
                f"Every rank along {axis} repeats {op_name(node.eqn.op)} at {node.eqn.source}, although {cut} is "
                f"sharded: the operation has no dim that could be split instead."
            )


def _sharded_origin(p: AxisProblem, choice: Choice, v: Var) -> Var | None:
    """The sharded value that v shows in another form, or v itself if that is sharded."""
    while not isinstance(p.made(choice, v), CUTS):
        maker = p.problem.makers[v][0]
        if maker.eqn is None or not is_view(maker.eqn):
            return None
        v = maker.operands[0]
    return v


def _without_rule(problem: Problem, solved: Solved) -> Iterator[str]:
    for node in problem.nodes:
        if node.eqn is None or node.rule is not None or node.layout is not None:
            continue
        if any(p.made(choice, v) != WHOLE for p, choice in solved.values() for v in node.operands):
            yield no_rule(node.eqn)


def no_rule(e: Eqn) -> str:
    """The message that an operation without a rule is given something sharded."""
    return (
        f"{op_name(e.op)} at {e.source} has no rule: every rank does all of it. State one with "
        'vescale_fn.register_rule(op, "b !d -> b !d").'
    )
