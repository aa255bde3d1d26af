"""`einsum` over named dims, with the axes that shard them in the pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from vescale_fn.primitives import constrained
from vescale_fn.regions.collectives import pcast, psum, psum_scatter
from vescale_fn.regions.region import current_region
from vescale_fn.sharding.grammar import parse_expr
from vescale_fn.sharding.mesh import axes_text
from vescale_fn.sharding.sizes import check_rank
from vescale_fn.sharding.spec import Expr, Factor, Spec, SpecError
from vescale_fn.tracing import current_trace


def einsum(*arguments: Any) -> Any:
    """A product of any number of tensors, contracted over the names that the right side of the pattern leaves out. The
    pattern comes last: `vf.einsum(x, w, "b s f/tp, f/tp d -> b s d")`.

    In a region the operands are what a rank holds. A contraction over a sharded dim leaves parts of a sum over its
    axes; the right side says what becomes of them: nothing about an axis sums them (psum), the axis on a dim scatters
    them (psum_scatter), and {sum: axis} leaves them as they are, unreduced. Inside pjit, outside any region, the axes
    say where operands and result live. On plain tensors the axes mean nothing.
    Raises SpecError for patterns that do not fit.

    >>> einsum(torch.ones(2, 3), torch.ones(3, 4), "b f/tp, f/tp d -> b d").shape
    torch.Size([2, 4])
    """
    *operands, text = arguments
    expr = _parsed(text, len(operands))
    for spec, x in zip(expr.left, operands):
        try:
            check_rank(spec, tuple(x.shape))
        except SpecError as e:
            raise e.within("vf.einsum") from None
    region, trace = current_region(), current_trace()
    if region is not None:
        return _on_ranks(operands, expr, text, region.manual)
    if trace is None:
        return torch.einsum(_letters(expr), *operands)
    placed = [constrained(trace.bring(x), str(s)) for x, s in zip(operands, expr.left)]
    assert expr.right is not None
    return constrained(torch.einsum(_letters(expr), *placed), str(expr.right[0]))


def _parsed(text: str, count: int) -> Expr:
    """The pattern, with one layout for each operand, and dims that are single names."""
    expr = parse_expr(text)
    if expr.right is None or len(expr.right) != 1 or len(expr.left) != count:
        raise SpecError(
            f"vf.einsum: The pattern needs a layout for each of the {count} operands, and one for the result: "
            "'b f, f d -> b d'.",
            text,
            0,
        )
    for spec in (*expr.left, *expr.right):
        for dim in spec.dims:
            if not isinstance(dim, Factor) or not dim.name or dim.name == "_":
                raise SpecError(f"vf.einsum: '{dim}' is no single name; every dim of an einsum is one.", text, 0)
    known = {n for s in expr.left for n in s.names}
    for name in expr.right[0].names:
        if name not in known:
            raise SpecError(f"vf.einsum: The result has a dim '{name}' that no operand has.", text, text.index("->"))
    return expr


def _letters(expr: Expr) -> str:
    """The pattern as torch.einsum writes it."""
    letters = dict(zip(dict.fromkeys(n for s in expr.left for n in s.names), ascii_letters))

    def one(spec: Spec) -> str:
        return "".join(letters[n] for n in spec.names)

    assert expr.right is not None
    return f"{','.join(map(one, expr.left))}->{one(expr.right[0])}"


def _axes_by_name(specs: Sequence[Spec], text: str) -> dict[str, tuple[str, ...]]:
    """The axes of each dim, on which all operands agree."""
    found: dict[str, tuple[str, ...]] = {}
    for spec in specs:
        for factor in spec.factors:
            axes = found.setdefault(factor.name, factor.axes)
            if axes != factor.axes:
                a, b = (axes_text(x) if x else "none" for x in (axes, factor.axes))
                raise SpecError(
                    f"vf.einsum: '{factor.name}' is sharded over {a} in one operand and over {b} in another. "
                    "Bring them together first: gather one, or take this rank's slice of the other.",
                    text,
                    0,
                )
    return found


def _on_ranks(operands: Sequence[Tensor], expr: Expr, text: str, manual: Mapping[str, int]) -> Any:
    """The einsum of what this rank holds, and what becomes of the sums that are pending then."""
    assert expr.right is not None
    (result,) = expr.right
    before = _axes_by_name(expr.left, text)
    pending = tuple(a for name in expr.contracted for a in before[name])
    out = torch.einsum(_letters(expr), *operands)
    kept = {a for e in result.state if e.kind == "sum" for a in e.axes}
    if kept - set(pending):
        extra = axes_text(sorted(kept - set(pending)))
        raise SpecError(f"vf.einsum: Nothing is contracted over {extra}, so no sum over it is pending.", text, 0)
    for dim, factor in enumerate(result.factors):
        old = before[factor.name]
        new = factor.axes[len(old) :]
        if factor.axes[: len(old)] != old or not set(new) <= set(pending):
            raise SpecError(
                f"vf.einsum: '{factor.name}' has the axes {axes_text(old or ('none',))} in the operands and "
                f"{axes_text(factor.axes or ('none',))} in the result. Only axes that are contracted can be added.",
                text,
                text.index("->"),
            )
        if new:
            out = psum_scatter(out, new, dim, tiled=True)
            pending = tuple(a for a in pending if a not in new)
    total = tuple(a for a in pending if a not in kept)
    out = psum(out, total) if total else out
    rest = tuple(a for a in pending if a in kept)
    return pcast(out, rest, to="unreduced") if rest else out
