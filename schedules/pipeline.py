"""Pipeline parallelism: the gradients of a chain of stages, each stage on the ranks that hold its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vescale_fn.form import Form, Staged
from vescale_fn.random.scope import per_iteration, resumed
from vescale_fn.schedules.accumulate import Accumulated, Whole, split, wide
from vescale_fn.schedules.gradient import Gradient, as_weighted
from vescale_fn.schedules.kinds import GradFunction
from vescale_fn.schedules.padding import UnevenMeans
from vescale_fn.schedules.pipelines import Table, check, schedule, with_transfers
from vescale_fn.schedules.sequential import Sequential, sequential
from vescale_fn.schedules.weighted import Weighted
from vescale_fn.sharding.layout import WHOLE, Partial, Ragged, State
from vescale_fn.stage import Stage, trace_stage
from vescale_fn.subprogram import Slots, loop
from vescale_fn.tracing import current_trace, sharding_of
from vescale_fn.tree import flatten, unflatten


@dataclass(frozen=True)
class Pipelined(GradFunction):
    """A gradient function whose stages run on different ranks; see `pipeline`."""

    chain: Sequential
    axis: str
    microbatches: int
    schedule: str | Table
    dim: int

    def sums(self, params: Any, *batch: Any) -> tuple[Any, Weighted]:
        ranks = self._ranks()
        if ranks == 1:
            return Accumulated(Gradient(self.chain), self.microbatches, self.dim, "step").sums(params, *batch)
        parts, whole = split(batch, self.microbatches, self.dim, "pipeline")
        return _Run(self, params, whole, self.table(ranks)).sums(parts)

    def table(self, ranks: int) -> Table:
        """The schedule for so many ranks, proved, with its sends and receives."""
        table = self.schedule
        if isinstance(table, str):
            table = schedule(table, ranks, self.microbatches, chunks=len(self.chain.stages) // ranks)
        table = check(table)
        return table if table.has_transfers else with_transfers(table)

    def _ranks(self) -> int:
        """How many ranks there are along the axis: one where nothing is traced."""
        trace = current_trace()
        if trace is None or trace.mesh is None:
            return 1
        return trace.mesh.shape[self.axis]


def pipeline(
    stages: Sequence[Callable[[Any, Any], Any]],
    loss: Callable[..., Any],
    axis: str = "pp",
    *,
    microbatches: int,
    schedule: str | Table | Path = "1f1b",
    dim: int = 0,
) -> Pipelined:
    """The gradient function of `sequential(stages, loss)`, with the stages divided over the ranks along `axis`.

    stages, loss: see `sequential`. With p ranks a schedule of v chunks needs v * p stages.
    axis: the mesh axis. Where it has one rank, and outside of a step, this is `accumulate`.
    microbatches: how many parts the batch is cut into along `dim`: rows i, i + microbatches, ... are microbatch i.
    schedule: the name of a table (see `pipelines.schedule`), a table of your own, or the path of a CSV file.

    A parameter that came with its whole on the rank of its stage (`"... {at: pp@1}"`) is used there, and its gradient
    stays there; any other is given to all ranks, and its gradient summed over them. Value and gradients are those of
    the loop over microbatches, added up in the order in which the schedule runs them.

    >>> import vescale_fn as vf
    >>> stages = [lambda w, x: torch.tanh(x @ w), lambda w, h: h @ w]
    >>> grad_fn = pipeline(stages, lambda y, t: (y - t).square().mean(), microbatches=2)
    >>> mesh = vf.make_mesh(pp=2)
    >>> params = [vf.device_put(torch.eye(2), f"a b {{at: pp@{i}}}", mesh) for i in range(2)]
    >>> grads, value = vf.pjit(grad_fn)(params, torch.ones(4, 2), torch.zeros(4, 2))
    >>> print(round(float(value), 4), grads[1].sharding)
    0.58 NamedSharding(pp=2: 'a b {at: pp@1}')
    """
    if isinstance(schedule, Path):
        schedule = Table.from_csv(schedule)
    return Pipelined(sequential(stages, loss), axis, microbatches, schedule, dim)


@dataclass(eq=False)
class _Run:
    """One trace of a pipeline. A pair is a stage and one of its parameters, which has a sum of gradients."""

    how: Pipelined
    params: Any
    whole: Whole
    table: Table
    given: dict[int, State] = field(default_factory=dict)  # see `Staged`
    trained: set[tuple[int, int]] = field(default_factory=set)  # pairs that have a gradient

    def __post_init__(self) -> None:
        self.leaves, self.form = flatten(self.params)
        self.own = self.how.chain.parameters(self.params)
        self.places = self._places()
        self.pairs = [
            (s, i) for s, found in enumerate(self.places) for i in found if self.leaves[i].dtype.is_floating_point
        ]

    def _places(self) -> list[list[int]]:
        """For every stage, which leaves of the parameters it is given."""
        tensors = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        if self.own[0] is self.params:
            return [tensors] * len(self.own)
        ends = [0]
        for tree in self.own:
            ends.append(ends[-1] + len(flatten(tree)[0]))
        return [[i for i in tensors if a <= i < b] for a, b in pairwise(ends)]

    def sums(self, parts: list[Tensor]) -> tuple[Any, Weighted]:
        zeros = {i: torch.zeros_like(self.leaves[i]) for i in dict.fromkeys(i for _, i in self.pairs)}
        value = torch.zeros((), dtype=wide(self.params), device=parts[0].device)
        count = torch.zeros((), dtype=torch.float64, device=parts[0].device)
        body, xs = per_iteration(self.microbatch, parts, self.how.microbatches)
        carried = tuple(self.state_of_sum(s, i) for s, i in self.pairs)
        table = self.table
        staged = Staged(
            self.how.axis,
            table.name,
            table.placement,
            tuple(tuple((a.kind, a.stage, a.microbatch) for a in row) for row in table.rows),
            self.given,
            (*carried, Partial(), Partial()),
        )
        init = ([zeros[i] for _, i in self.pairs], value, count)
        form = Form("pipeline", length=self.how.microbatches, staged=staged)
        (found, value, count), _ = loop(body, init, xs, form)
        sums: list[Any] = [torch.zeros_like(x) if isinstance(x, Tensor) else x for x in self.leaves]
        done: set[int] = set()
        for (s, i), g in zip(self.pairs, found):
            if (s, i) in self.trained:
                sums[i] = sums[i] + g if i in done else g
                done.add(i)
        return unflatten(self.form, sums), Weighted(value, count)

    def microbatch(self, total: Any, part: Any) -> tuple[Any, None]:
        """Gradients and value of one microbatch, added to the sums."""
        x, *rest = unflatten(self.whole.form, self.whole.fill(part))
        passes: list[_Pass] = []
        for s in range(len(self.own)):
            passes.append(self.forward(s, x, rest))
            x = passes[-1].result
        grads = self.backward(passes)
        sums = [t + grads[pair] if pair in grads else t for pair, t in zip(self.pairs, total[0])]
        return (sums, total[1] + x.sum, total[2] + x.count), None

    def forward(self, s: int, x: Any, rest: list[Any]) -> _Pass:
        """Stage s on what it receives, and on the rest of the batch if it is the last."""
        last = s == len(self.own) - 1
        leaves, form = flatten((self.own[s], x, rest if last else []))
        slots, n = Slots.of(leaves), len(self.places[s])
        values = slots.dynamic(leaves)
        made: list[Any] = []

        def run(weights: list[Any], inputs: list[Any]) -> list[Tensor]:
            own, x, rest = unflatten(form, slots.fill([*weights, *inputs]))
            with UnevenMeans((weights, x), rest) as means:
                y = self.how.chain.stages[s](own, x)
                if last:
                    loss = self.how.chain.loss
                    y = as_weighted(loss(y, *rest), "schedules.pipeline", loss)
            if last and type(y.count) is int:
                means.refuse("pipeline")
            made[:] = flatten(y)
            return Slots.of(made[0]).dynamic(made[0])

        received = len(Slots.of(flatten(x)[0]).dynamic(flatten(x)[0]))
        pulled = [i for i, v in enumerate(values[n : n + received]) if s and v.dtype.is_floating_point]
        stage = trace_stage(s, resumed(run), values[:n], values[n:], pulled)
        self.note(stage)
        results, residuals = stage.forward()
        result = unflatten(made[1], Slots.of(made[0]).fill(results))
        return _Pass(stage, results, residuals, result)

    def note(self, stage: Stage) -> None:
        """Remember which parameters a stage reads, and where they are."""
        for k in stage.trained:
            self.trained.add((stage.index, self.places[stage.index][k]))
        for i in self.places[stage.index]:
            x, at = self.leaves[i], self.state_of_sum(stage.index, i)
            at = WHOLE if at == Partial() else at
            if self.given.setdefault(id(x), at) != at:
                self.given[id(x)] = WHOLE

    def backward(self, passes: list[_Pass]) -> dict[tuple[int, int], Tensor]:
        """Gradients by pair, from the last stage to the first."""
        grads: dict[tuple[int, int], Tensor] = {}
        cotangents = [torch.ones_like(passes[-1].results[0])]
        cotangents += [torch.zeros_like(r) for r in passes[-1].results[1:] if r.dtype.is_floating_point]
        for p in reversed(passes):
            s = p.stage.index
            of_inputs, kept = p.stage.input_half(cotangents, p.residuals)
            of_weights = p.stage.weight_half(cotangents, p.residuals, kept)
            grads.update(((s, self.places[s][k]), g) for k, g in zip(p.stage.trained, of_weights))
            cotangents = of_inputs
        return grads

    def state_of_sum(self, s: int, i: int) -> State:
        """The state along the axis of the gradient of leaf i that stage s gives: on its rank, if the leaf is."""
        x, axis = self.leaves[i], self.how.axis
        at = sharding_of(x)
        state = None if at is None else at.layout(x.shape)[axis]
        home = self.table.placement[s]
        if isinstance(state, Ragged) and all((r == home) == bool(n) for r, n in enumerate(state.units)):
            return state
        return Partial()


@dataclass(frozen=True, eq=False)
class _Pass:
    """A stage's forward of one microbatch."""

    stage: Stage
    results: list[Tensor]
    residuals: list[Tensor]
    result: Any  # as the stage returned it
