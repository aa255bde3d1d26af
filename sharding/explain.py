"""A plan in words: what each value's layout is, why, what it costs, and what the next best would have cost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from vescale_fn.sharding.choice import AxisProblem, Choice
from vescale_fn.sharding.classes import classes_of
from vescale_fn.sharding.exact import NoSolution, solve_exact
from vescale_fn.sharding.graph import Source, Var, op_name, type_text
from vescale_fn.sharding.layout import CUTS, Layout, Partial, State, Whole
from vescale_fn.sharding.plan import Plan
from vescale_fn.sharding.problem import Node


def explain(plan: Plan, value: str | Var) -> str:
    """Why a value has its layout, what bringing it to its users costs, and the runner-up.

    value: a Var, its name, or the path of an argument ("params.wte"; its last parts are enough if they are unique).
    Raises KeyError, with the names that are close, where no value or more than one is meant.
    """
    v = value if isinstance(value, Var) else find(plan, value)
    lines = [f"{v}: {type_text(v)}, {_layout_text(plan.values[v])}"]
    for problem, choice in plan.choices:
        lines += [f"  {problem.axis}: {line}" for line in _axis_lines(problem, choice, v)]
    return "\n".join(lines)


def find(plan: Plan, path: str) -> Var:
    """The value that a path or name means: an input before other values, a whole name before the end of one."""
    name = re.sub(r"\W+", "_", path).strip("_")
    found: list[Var] = []
    for pool in (plan.graph.inputs, tuple(plan.values)):
        here = [v for v in pool if v in plan.values]
        found = found or [v for v in here if v.name == name] or [v for v in here if v.name.endswith(f"_{name}")]
    if len(found) == 1:
        return found[0]
    close = [v.name for v in (found or plan.graph.inputs)][:5]
    what = "Several values match" if found else "No value is called"
    raise KeyError(f"{what} {path!r}. There are: {', '.join(close) or 'none'}.")


def plan_text(plan: Plan) -> str:
    """Inputs with role and layout, then every conversion with the line that needs it, then the messages."""
    lines = [f"plan on {plan.mesh}"]
    for v in plan.graph.inputs:
        if v in plan.values:
            lines.append(f"  {plan.roles.get(v, 'free'):5} {v}: {type_text(v)}, {_layout_text(plan.values[v])}")
    for problem, choice in plan.choices:
        lines += [f"  {line}" for line in _conversion_lines(problem, choice)]
    return "\n".join([*lines, *(f"  note: {m}" for m in plan.messages)])


def _layout_text(layout: Layout) -> str:
    on = [f"{a} {s}" for a, s in zip(layout.mesh.names, layout.states) if not isinstance(s, Whole)]
    return ", ".join(on) or "whole"


# --- one value on one axis ------------------------------------------------------------------------------------------


def _axis_lines(problem: AxisProblem, choice: Choice, v: Var) -> Iterator[str]:
    state = problem.made(choice, v)
    yield f"{state}: {_reason(problem, choice, v)}"
    for src, dst in problem.conversions(choice, v):
        yield f"  {_conversion(problem, choice, v, src, dst)}"
    yield f"  {_runner_up(problem, choice, v, state)}"


def _reason(problem: AxisProblem, choice: Choice, v: Var) -> str:
    node, _ = problem.problem.makers[v]
    if node.layout is not None:
        return f"asked for at {node.eqn.source}" if node.eqn else "the layout it comes in"
    strategy = problem.chosen(choice, node)
    made_by = f"{op_name(node.eqn.op)} at {node.eqn.source}" if node.eqn else "the argument"
    if len(problem.strategies[node]) == 1:
        return f"nothing that the user sharded reaches {made_by}"
    if strategy.letter:
        return f"{made_by} runs as {strategy}"
    if any(isinstance(s, Partial) for s in strategy.states):
        return f"{made_by} passes a pending reduction on"
    return f"{made_by} is repeated on every rank"


def _conversion(problem: AxisProblem, choice: Choice, v: Var, src: State, dst: State) -> str:
    """`partial sum -> whole for aten.mm at f.py:3 (1.20 us)`."""
    cost = _time(problem.seconds(v, src, dst))
    user = next((u for u, i in problem.problem.users[v] if problem.chosen(choice, u).operands[i] == dst), None)
    return f"{src} -> {dst} for {_user_text(user)} ({cost})"


def _user_text(user: Node | None) -> str:
    if user is None:
        return "all its users"
    return f"{op_name(user.eqn.op)} at {user.eqn.source}" if user.eqn else "an output of the step"


def _runner_up(problem: AxisProblem, choice: Choice, v: Var, state: State) -> str:
    """The best plan in which the value has any other state."""
    other = _without(problem, v, state)
    if other is None:
        return "no other layout was possible"
    try:
        second = solve_exact(other, classes_of(other))
    except NoSolution:
        return "no other layout was possible"
    more = other.cost(second) - problem.cost(choice)
    if more == inf:
        return "no other layout was possible"
    return f"runner-up: {other.made(second, v)}, {_time(max(more, 0.0))} more"


def _without(problem: AxisProblem, v: Var, state: State) -> AxisProblem | None:
    """The problem in which a value must not be made in `state`; None if it then cannot be made."""
    node, slot = problem.problem.makers[v]
    kept = [k for k, s in enumerate(problem.strategies[node]) if s.states[slot] != state]
    if not kept:
        return None
    return replace(
        problem,
        strategies={**problem.strategies, node: [problem.strategies[node][k] for k in kept]},
        work={**problem.work, node: [problem.work[node][k] for k in kept]},
    )


def _time(seconds: float) -> str:
    """In the largest unit that leaves something before the point.

    >>> _time(1.5e-3), _time(2e-8)
    ('1.50 ms', '0.02 us')
    """
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _conversion_lines(problem: AxisProblem, choice: Choice) -> Iterator[str]:
    for v in problem.problem.makers:
        for src, dst in problem.conversions(choice, v):
            if not (isinstance(src, Whole) and isinstance(dst, CUTS)):
                made = problem.problem.makers[v][0].eqn
                where = f" ({made.source})" if made and made.source != Source() else ""
                yield f"{problem.axis}: {v}{where} {_conversion(problem, choice, v, src, dst)}"
