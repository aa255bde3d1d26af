"""Rematerialisation: backward computes again what it would otherwise keep from forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vescale_fn.remat import Budget, Dots, Names, Policy, Whole
from vescale_fn.schedules.kinds import Loss, check_kind
from vescale_fn.subprogram import call

POLICIES: Mapping[str, Policy | None] = {"whole": Whole(), "none": None, "dots": Dots()}


@dataclass(frozen=True)
class Remat(Loss):
    """A function whose backward computes forward again; see `remat`."""

    fn: Callable[..., Any]
    policy: Policy | None

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args) if self.policy is None else call(self.fn, *args, remat=self.policy)


def remat(fn: Callable[..., Any], policy: str | Policy = "whole") -> Remat:
    """`fn`, a loss or a part of one such as a layer, of which backward computes again what the policy does not keep.

    policy: "whole" keeps nothing but the arguments; "none" leaves fn as it is; "dots" keeps what matrix products,
        convolutions and attention give; `names("a", ...)` the values that `vf.named(x, "a")` names; `budget(nbytes)` at
        most so many bytes (of global values), those that save most work for each byte.
    Raises ValueError for a policy that does not exist, TypeError when fn is an optimizer, gradient function or step.

    >>> import torch, vescale_fn as vf
    >>> layer = remat(lambda h, w: torch.tanh(h @ w), "dots")
    >>> layer(torch.ones(1, 2), torch.zeros(2, 2))
    tensor([[0., 0.]])
    """
    check_kind("remat", "loss", fn)
    if isinstance(policy, str):
        if policy not in POLICIES:
            known = ", ".join(f"'{p}'" for p in POLICIES)
            raise ValueError(
                f"schedules.remat: there is no policy '{policy}': there are {known}, schedules.names(...) and "
                "schedules.budget(nbytes)."
            )
        return Remat(fn, POLICIES[policy])
    return Remat(fn, policy)


def names(*kept: str) -> Names:
    """The policy that keeps the values with these names; see `remat`."""
    return Names(kept)


def budget(nbytes: int) -> Budget:
    """The policy that keeps at most `nbytes` bytes of values; see `remat`. Raises ValueError when negative."""
    if nbytes < 0:
        raise ValueError(f"schedules.budget: nbytes={nbytes} must not be negative.")
    return Budget(nbytes)
