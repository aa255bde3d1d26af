"""Gradient accumulation: the gradients of a batch as those of its parts, one after the other in a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from vescale_fn.optim import Optimizer
from vescale_fn.primitives import reshard
from vescale_fn.schedules.kinds import GradFunction, check_kind, wrong_kind
from vescale_fn.schedules.padding import UnevenMeans
from vescale_fn.schedules.weighted import Weighted
from vescale_fn.schedules.zero import Zero
from vescale_fn.subprogram import scan
from vescale_fn.tracing import sharding_of
from vescale_fn.tree import flatten, flatten_with_paths, map_leaves, unflatten

Reduce = Literal["step", "microbatch"]


@dataclass(frozen=True)
class Accumulated(GradFunction):
    """A gradient function that runs on microbatches; see `accumulate`."""

    grad_fn: Callable[..., Any]
    microbatches: int
    dim: int
    reduce: Reduce
    optimizer: Optimizer | None = field(default=None, repr=False)

    def sums(self, params: Any, *batch: Any) -> tuple[Any, Weighted]:
        parts, whole = split(batch, self.microbatches, self.dim)
        device = parts[0].device
        zeros = map_leaves(lambda p: None if p is None else torch.zeros_like(p), params)
        value = torch.zeros((), dtype=wide(params), device=device)
        count = torch.zeros((), dtype=torch.float64, device=device)

        def body(total: Any, part: Any) -> tuple[Any, None]:
            grads, value = self._sums_of_part(params, part, whole)
            grads = self._reduced(grads, params) if self.reduce == "microbatch" else grads
            added = map_leaves(lambda t, g: t if g is None else t + g, total[0], grads)
            return (added, total[1] + value.sum, total[2] + value.count), None

        (grads, value, count), _ = scan(body, (zeros, value, count), parts)
        return grads, Weighted(value, count)

    def _sums_of_part(self, params: Any, part: Sequence[Any], whole: Any) -> tuple[Any, Weighted]:
        batch = unflatten(whole.form, whole.fill(part))
        params = map_leaves(_stays, params) if self.reduce == "microbatch" else params
        with UnevenMeans(params, batch) as means:
            if isinstance(self.grad_fn, GradFunction):
                grads, value = self.grad_fn.sums(params, *batch)
            else:
                grads, value = _pair(self.grad_fn, self.grad_fn(params, *batch))
        if type(value.count) is int:
            means.refuse()
        _check_form(params, grads)
        return grads, value

    def _reduced(self, grads: Any, params: Any) -> Any:
        """`grads` where they are added up: where the optimizer wants them, else where the parameters live."""

        (leaves, tree), at = flatten(grads), [None if p is None else sharding_of(p) for p in flatten(params)[0]]
        if isinstance(self.optimizer, Zero):
            at = [*self.optimizer.gradients(at, params)]
        return unflatten(tree, [g if g is None or x is None else reshard(g, str(x.spec)) for g, x in zip(leaves, at)])


def accumulate(
    grad_fn: Callable[..., tuple[Any, Any]],
    microbatches: int,
    dim: int = 0,
    *,
    reduce: Reduce | None = None,
    optimizer: Optimizer | None = None,
) -> Accumulated:
    """`grad_fn`, run on microbatches one after the other: the same gradients and value, for the memory of one part.

    grad_fn: (params, *batch) -> (grads, value), from `vf.grad_and_value` or torch.func.grad_and_value. The value, at
        least a float32, and the gradients are means over microbatches; where the loss returns `vf.weighted(sum, count)`
        they are the sums over all of them, divided once by the count of all.
    microbatches: how many; it divides the extent of the batch along `dim`. Microbatch i holds the rows i,
        i + microbatches, ..., so that no row leaves its rank. Leaves without dims go to each of them as they are.
    reduce: "step" adds up each rank's gradients and reduces them once, after the loop, for the memory of whole
        gradients; "microbatch" reduces those of each microbatch, and adds up only the shards that a rank keeps.
        Parameters that are sharded are gathered once for all microbatches, or in each.
    optimizer: the `schedules.zero` that takes the gradients, which then live where it wants them. `reduce` is then
        "microbatch" by default for stages 2 and 3; otherwise it is "step".
    Raises ValueError when the batch cannot be cut so, and for a mean over a number of items that depends on the data,
    which would weigh microbatches wrongly; TypeError when `grad_fn` is no gradient function.

    >>> import vescale_fn as vf
    >>> grad_fn = accumulate(vf.grad_and_value(lambda w, x: (w * x).square().mean()), 2)
    >>> grad_fn(torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    (tensor(15.), tensor(7.5000))
    """
    check_kind("accumulate", "gradient function", grad_fn)
    if microbatches < 1:
        raise ValueError(f"schedules.accumulate: microbatches={microbatches} must be at least 1.")
    if reduce not in (None, "step", "microbatch"):
        raise ValueError(f"schedules.accumulate: reduce={reduce!r} must be 'step' or 'microbatch'.")
    if reduce is None:
        sharded = isinstance(optimizer, Zero) and optimizer.shards_gradients
        reduce = "microbatch" if sharded else "step"
    return Accumulated(grad_fn, microbatches, dim, reduce, optimizer)


# ---- cutting the batch


@dataclass(frozen=True)
class Whole:
    """The form of a batch, its leaves that are not cut, and which these are."""

    form: Any
    leaves: Sequence[Any]
    is_cut: Sequence[bool]

    def fill(self, parts: Sequence[Any]) -> list[Any]:
        rest = iter(parts)
        return [next(rest) if cut else x for x, cut in zip(self.leaves, self.is_cut)]


def split(batch: tuple[Any, ...], n: int, dim: int, by: str = "accumulate") -> tuple[list[Any], Whole]:
    """The leaves of a batch that have dims, with the microbatches along a new dim 0, and the rest. by: who asks."""
    paths, leaves, form = flatten_with_paths(batch)
    is_cut = [getattr(x, "ndim", 0) > 0 for x in leaves]
    parts = []
    for path, x, cut in zip(paths, leaves, is_cut):
        if not cut:
            continue
        where = f"schedules.{by}: argument {path} of the batch has shape {list(x.shape)}"
        if not -x.ndim <= dim < x.ndim:
            raise ValueError(f"{where}, and so no dim {dim} to cut into microbatches. State another `dim`.")
        d = dim % x.ndim
        if x.shape[d] % n:
            raise ValueError(
                f"{where}: its dim {d} of {x.shape[d]} rows cannot be cut into {n} microbatches of equal size. Choose "
                "a number that divides it, or pad the batch and return vf.weighted(sum, count) from the loss."
            )
        parts.append(x.unflatten(d, (x.shape[d] // n, n)).movedim(d + 1, 0))
    if not parts:
        raise ValueError(f"schedules.{by}: the batch has no tensor with dims that could be cut into microbatches.")
    return parts, Whole(form, [None if cut else x for x, cut in zip(leaves, is_cut)], is_cut)


def _stays(p: Any) -> Any:
    """A parameter that enters the loop as it lives: what is sharded is gathered in each iteration, not before all."""
    at = None if p is None else sharding_of(p)
    return p if at is None else reshard(p, str(at.spec))


# ---- what the gradient function gave


def wide(params: Any) -> torch.dtype:
    """What values are added up in: the widest dtype of the parameters, at least float32."""
    wide = torch.float32
    for p in flatten(params)[0]:
        wide = wide if p is None else torch.promote_types(wide, p.dtype)
    return wide


def _pair(grad_fn: Any, result: Any) -> tuple[Any, Weighted]:
    """Gradients and value of a plain gradient function."""
    name = getattr(grad_fn, "__name__", "grad_fn")
    if isinstance(result, (torch.Tensor, Weighted)):
        raise TypeError(wrong_kind("accumulate", "gradient function", "loss", name))
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"schedules.accumulate: {name} must return (grads, value), but it returned {_type(result)}.")
    grads, value = result
    if not (isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()):
        raise TypeError(
            f"schedules.accumulate: the value that {name} returns must be a 0-d floating-point tensor, but it is "
            f"{_type(value)}."
        )
    return grads, Weighted(value, 1)


def _check_form(params: Any, grads: Any) -> None:
    if flatten(params)[1] != flatten(grads)[1]:
        here, there = flatten_with_paths(params)[0], flatten_with_paths(grads)[0]
        odd = sorted(set(here) ^ set(there)) or ["the tree itself"]
        raise ValueError(
            "schedules.accumulate: the gradients must have the form of the parameters, but they differ in "
            f"{', '.join(odd[:5])}."
        )


def _type(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
