"""What a stage costs: time of its actions and of its transfers, and what it holds between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fn.schedules.pipelines import messages

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs of every stage, in any unit of time and of memory. Make one with `Costs.of`.

    `transfer[s]` is the time that a value needs between the ranks of stages s and s+1, in either direction; it keeps
    no rank busy, and costs nothing where both stages live on one rank. `activation[s]` is held from forward until the
    whole backward; where backward is split, `kept[s]` of it (or more) is held from its input half until its weight
    half.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    transfer: tuple[float, ...]
    activation: tuple[float, ...]
    kept: tuple[float, ...]

    @staticmethod
    def of(
        stages: int,
        *,
        forward: PerStage = 1,
        backward_input: PerStage = 1,
        backward_weight: PerStage = 1,
        transfer: PerStage = 0,
        activation: PerStage = 1,
        kept: PerStage | None = None,
    ) -> Costs:
        """One number for all stages, or one per stage. `kept` is the whole activation if nothing is said.

        Raises ValueError when a sequence has another length than `stages`, or a cost is negative.

        >>> Costs.of(2, forward=[1, 3]).forward, Costs.of(2).duration("B", 1)
        ((1, 3), 2)
        """
        given = {
            "forward": forward,
            "backward_input": backward_input,
            "backward_weight": backward_weight,
            "transfer": transfer,
            "activation": activation,
            "kept": activation if kept is None else kept,
        }
        return Costs(**{name: _per_stage(name, value, stages) for name, value in given.items()})

    @property
    def stages(self) -> int:
        return len(self.forward)

    def duration(self, kind: str, stage: int) -> float:
        """Time of an F, B, I or W of this stage."""
        return self.durations()[kind][stage]

    def durations(self) -> dict[str, tuple[float, ...]]:
        """Times by kind, then by stage."""
        whole = tuple(i + w for i, w in zip(self.backward_input, self.backward_weight))
        return {"F": self.forward, "B": whole, "I": self.backward_input, "W": self.backward_weight}

    def growth(self) -> dict[str, tuple[float, ...]]:
        """By how much an action changes what its rank holds, by kind, then by stage."""
        return {
            "F": self.activation,
            "B": tuple(-a for a in self.activation),
            "I": tuple(k - a for k, a in zip(self.kept, self.activation)),
            "W": tuple(-k for k in self.kept),
        }


def fits(held: float, limit: float) -> bool:
    """Whether `held` is within `limit`, up to the rounding of sums of floats."""
    return held <= limit + 1e-9 * abs(limit)


def _per_stage(name: str, value: PerStage, stages: int) -> tuple[float, ...]:
    values = (value,) * stages if isinstance(value, (int, float)) else tuple(value)
    if len(values) != stages:
        raise ValueError(messages.wrong_costs(name, len(values), stages))
    if bad := [s for s, v in enumerate(values) if not v >= 0]:
        raise ValueError(messages.negative_cost(name, bad[0], values[bad[0]]))
    return values
