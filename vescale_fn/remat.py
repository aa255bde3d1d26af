"""What backward keeps of a sub-program, and what it computes again: the policies of `call(fn, remat=...)`.

A policy names values to keep, of the equations of forward in order; everything else that backward needs it computes
again from the arguments and from what is kept. Sizes are global ones: they do not know the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vescale_fn.sharding.graph import Eqn, Var, is_view
from vescale_fn.sharding.work import is_heavy

_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("named(Tensor x, str name) -> Tensor")
_LIBRARY.impl("named", lambda x, name: x.clone(), "CompositeExplicitAutograd")

NAMED = torch.ops.vescale_fn.named.default


class Policy(Protocol):
    """Which values of forward are kept for backward."""

    def kept(self, forward: Sequence[Eqn]) -> Collection[Var]: ...


@dataclass(frozen=True)
class Whole:
    """Keep nothing: compute everything again."""

    def kept(self, forward: Sequence[Eqn]) -> Collection[Var]:
        return ()


@dataclass(frozen=True)
class Dots:
    """Keep what matrix products, convolutions and attention give; the rest is cheap to compute again."""

    def kept(self, forward: Sequence[Eqn]) -> Collection[Var]:
        return [v for e in forward if is_heavy(e) for v in e.outs]


@dataclass(frozen=True)
class Names:
    """Keep the values that `named` gave these names. Raises ValueError for a name that the function does not give."""

    names: tuple[str, ...]

    def kept(self, forward: Sequence[Eqn]) -> Collection[Var]:
        found = {e.outs[0]: e.args[1] for e in forward if e.op is NAMED}
        for name in self.names:
            if name not in found.values():
                given = ", ".join(sorted({f"'{n}'" for n in found.values()})) or "none"
                raise ValueError(
                    f"remat: the policy keeps '{name}', but the function names no such value (it names: {given}). "
                    f'Name it where it is computed: x = vf.named(x, "{name}").'
                )
        return [v for v, name in found.items() if name in self.names]


@dataclass(frozen=True)
class Budget:
    """Keep at most `nbytes` of values (global sizes), those first that save most work for each byte."""

    nbytes: int

    def kept(self, forward: Sequence[Eqn]) -> Collection[Var]:
        made = [(v, e) for e in forward if not is_view(e) and e.operands for v in e.outs if v.is_tensor]
        left, chosen = self.nbytes, []
        for v, _ in sorted(made, key=lambda pair: -work_of(pair[1]) / max(_nbytes(pair[0]), 1)):
            if _nbytes(v) <= left:
                left -= _nbytes(v)
                chosen.append(v)
        return chosen


def _nbytes(v: Var) -> int:
    return math.prod(v.shape) * int(v.dtype.itemsize)


def work_of(e: Eqn) -> float:
    """What computing an equation takes: for a product of [m, k] and [k, n] its 2 m n k operations, which is twice the
    root of the product of all three sizes; one operation for each element otherwise."""
    sizes = [float(math.prod(v.shape)) for v in (*e.operands[:2], *e.outs[:1])]
    return 2 * math.prod(sizes) ** 0.5 if is_heavy(e) else max(sizes)


def as_policy(remat: bool | Policy) -> Policy | None:
    """The policy that `remat=` asks for; None is the rule of sub-programs, which keeps what backward reads."""
    return Whole() if remat is True else remat or None
