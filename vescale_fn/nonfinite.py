"""Where a program first makes a NaN or an infinity: checks behind its equations, and what they say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vescale_fn.program import Program
from vescale_fn.sharding.graph import Eqn, Var, dtype_text, op_name
from vescale_fn.sharding.mesh import MeshShape, rank_text

# Of what is found: the operands that it is made from, its name for one and for more, and the fix.
_TEXTS = {
    "NaN": (
        "operands without NaN",
        ("NaN", "NaN"),
        "Keep its operands away from where it has no value: clamp them, or choose with torch.where before it.",
    ),
    "infinities": (
        "finite operands",
        ("infinity", "infinities"),
        "If they are meant, vf.debug(nans=True, infs=False) watches for NaN only.",
    ),
}


class NonFiniteError(FloatingPointError):
    """An operation made a NaN or an infinity out of finite numbers. order: where it stands in the program."""

    def __init__(self, text: str, order: int = 0) -> None:
        super().__init__(text)
        self.order = order


class FirstFound:
    """Keeps what ranks find that run one after the other, up to where they meet, and raises what comes first in the
    program. With it around each of them, no rank keeps the others from looking."""

    def __init__(self) -> None:
        self.found: list[NonFiniteError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, NonFiniteError):
            self.found.append(error)
            return True
        return False

    def raise_first(self) -> None:
        if self.found:
            raise min(self.found, key=lambda e: e.order)


@dataclass(frozen=True, eq=False)
class FiniteCheck:
    """Raises NonFiniteError on a rank where the results of `eqn` are not finite but its operands are. A NaN needs
    operands without NaN only. infs: infinities count. order: of the check in the program."""

    step: str
    mesh: MeshShape
    eqn: Eqn
    infs: bool
    order: int

    name = "check_finite"

    def __call__(self, rank: int, results: Sequence[Tensor], operands: Sequence[Any]) -> None:
        if any(hasattr(x, "fake_mode") or not x.numel() for x in (*results, *_tensors(operands))):
            return  # only described; or a part of nothing, of which a reduction gives its identity
        if all(bool(x.isfinite().all()) for x in results) or any(map(_has_nan, operands)):
            return
        if any(map(_has_nan, results)):
            raise NonFiniteError(self.text(rank, results, operands, "NaN"), self.order)
        if self.infs and not any(map(_has_inf, operands)):
            raise NonFiniteError(self.text(rank, results, operands, "infinities"), self.order)

    def text(self, rank: int, results: Sequence[Tensor], operands: Sequence[Any], what: str) -> str:
        count = sum(int((x.isnan() if what == "NaN" else x.isinf()).sum()) for x in results)
        given, noun, fix = _TEXTS[what]
        e, total = self.eqn, sum(x.numel() for x in results)
        rows = [("result", v, x) for v, x in zip(_floats(e.outs), results)]
        rows += [("operand", v, x) for v, x in zip(e.reads, operands)]
        width = max(len(v.name) for _, v, _ in rows)
        found = f"{count} {noun[count > 1]} of {total} value{'s' * (total > 1)}"
        line = f"{e.source}: {e.source.code}" if e.source.file else "an unknown line"
        return "\n".join(
            [
                f"{self.step}: {op_name(e.op)} makes {found} from {given}, on {_where(rank, self.mesh)}, in {e.phase}, "
                f"at {line}",
                *(f"  {kind:<7}  {v.name:<{width}}  {range_text(x)}" for kind, v, x in rows),
                fix,
            ]
        )


@dataclass(frozen=True, eq=False)
class ArgumentCheck:
    """Raises NonFiniteError for an input of the program that holds a NaN. paths: what inputs are called."""

    step: str
    mesh: MeshShape
    paths: Sequence[str]

    name = "check_arguments"

    def __call__(self, rank: int, inputs: Sequence[Tensor]) -> None:
        for path, x in zip(self.paths, inputs):
            if not hasattr(x, "fake_mode") and _has_nan(x):
                raise NonFiniteError(
                    f"{self.step}: {path} holds NaN before the step computes anything, on {_where(rank, self.mesh)}: "
                    f"{range_text(x)}. Look at the step, or the data, that made it."
                )


def _where(rank: int, mesh: MeshShape) -> str:
    return f"{rank_text(rank, mesh.coords(rank))} of mesh {mesh}"


def worth_checking(e: Eqn) -> bool:
    """Whether an equation computes floating-point numbers out of others. What holds a NaN that the step itself wrote
    cannot tell."""
    return bool(e.operands) and any(True for _ in _floats(e.outs)) and not any(map(math.isnan, _numbers(e)))


def check_of(e: Eqn, program: Program, step: str, infs: bool, order: int) -> tuple[FiniteCheck, list[Var], list[Var]]:
    """The check of an equation, and the results and operands that it looks at. An infinity is meant where the step
    wrote one, and as the identity of a pending maximum."""
    kinds = {kind for v in e.outs if v in program.layouts for _, kind in program.layouts[v].partial}
    meant = any(map(math.isinf, _numbers(e))) or not kinds.isdisjoint({"max", "min"})
    return FiniteCheck(step, program.mesh, e, infs and not meant, order), [*_floats(e.outs)], [*e.reads]


def range_text(x: Any) -> str:
    """Type, smallest and largest finite value, and how many others there are.

    >>> import math, torch
    >>> range_text(torch.tensor([0.5, 2.0, math.nan, -math.inf]))
    'f32[4] from 0.5 to 2, 1 NaN, 1 inf'
    """
    if not isinstance(x, Tensor):
        return f"{type(x).__name__} {x}"
    kind = f"{dtype_text(x.dtype)}{list(x.shape)}"
    if not x.numel() or x.is_complex():
        return kind
    wide = x.double()
    finite, nans, infs = wide[wide.isfinite()], int(wide.isnan().sum()), int(wide.isinf().sum())
    within = f" from {float(finite.min()):.6g} to {float(finite.max()):.6g}" if finite.numel() else " nothing finite"
    return kind + within + (f", {nans} NaN" if nans else "") + (f", {infs} inf" if infs else "")


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (x for x in values if isinstance(x, Tensor))


def _floats(values: Sequence[Var]) -> Iterator[Var]:
    return (v for v in values if v.is_tensor and (v.dtype.is_floating_point or v.dtype.is_complex))


def _has_nan(x: Any) -> bool:
    return bool(x.isnan().any()) if isinstance(x, Tensor) else isinstance(x, float) and math.isnan(x)


def _has_inf(x: Any) -> bool:
    return bool(x.isinf().any()) if isinstance(x, Tensor) else isinstance(x, float) and math.isinf(x)


def _numbers(e: Eqn) -> Iterator[float]:
    """The floating-point constants among the arguments of an equation."""

    def within(tree: Any) -> Iterator[float]:
        if isinstance(tree, float):
            yield tree
        elif isinstance(tree, (tuple, list)):
            for t in tree:
                yield from within(t)
        elif isinstance(tree, dict):
            yield from within([*tree.values()])

    return within([*e.args, e.kwargs])
