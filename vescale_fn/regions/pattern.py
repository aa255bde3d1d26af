"""Patterns: a collective said by the layout before and after it, in the grammar of specs.

| pattern                          | collective                                       |
|----------------------------------|--------------------------------------------------|
| `"b d {sum: tp} -> b d"`         | psum over tp                                     |
| `"b s/tp d -> b s d"`            | all_gather over tp along the dim of s            |
| `"b s/tp d -> b s d {ct: tp}"`   | the same, to a reduced value                     |
| `"b s d {sum: tp} -> b s/tp d"`  | psum_scatter over tp along the dim of s          |
| `"e c/ep d -> e/ep c d"`         | all_to_all, split at e, joined at c              |
| `"b s d -> b s/tp d"`            | this rank's slice (in psum_scatter: of the sum)  |
| `"b d -> b d {sum: tp}"`         | pcast over tp to unreduced; {ct: tp}, to reduced |

A pattern is exactly one collective; one that is another, or several, is an error that says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from vescale_fn.sharding.grammar import parse_expr
from vescale_fn.sharding.mesh import MeshShape, axes_text
from vescale_fn.sharding.spec import Dim, Factor, Group, Spec, SpecError


@dataclass(frozen=True)
class Moved:
    """What a pattern does. dim: where pieces are joined (all_gather, all_to_all) or cut (psum_scatter, own_slice);
    split_dim: where an all_to_all cuts. Dims behind "..." count from the end. reduced: an all_gather to reduced."""

    kind: str
    axes: tuple[str, ...]
    dim: int = 0
    split_dim: int = 0
    reduced: bool = False
    before: Spec = field(default=Spec(()))

    def __str__(self) -> str:
        over = f"{self.kind} over {axes_text(self.axes)}"
        if self.kind == "all_to_all":
            return f"{over}, cut at dim {self.split_dim} and joined at dim {self.dim}"
        if self.kind == "pcast":
            return f"{over} to {'reduced' if self.reduced else 'unreduced'}"
        return over if self.kind == "psum" else f"{over} along dim {self.dim}"


def is_pattern(axis: object) -> bool:
    """Whether the second argument of a collective is a pattern, and not the name of an axis."""
    return isinstance(axis, str) and ("->" in axis or " " in axis or "/" in axis)


def read(function: str, text: str, mesh: MeshShape) -> Moved:
    """The one collective that a pattern says. Raises SpecError where it says none, or several.

    >>> print(read("all_gather", "b s/tp d -> b s d", MeshShape(("tp",), (2,))))
    all_gather over tp along dim 1
    """
    expr = parse_expr(text, mesh)
    if len(expr.left) != 1 or expr.right is None or len(expr.right) != 1:
        raise _error(function, "A pattern has one layout on each side of '->', as in 'b s/tp d -> b s d'.", text, 0)
    (before,), (after,) = expr.left, expr.right
    if [_bare(d) for d in before.dims] != [_bare(d) for d in after.dims]:
        why = "Both sides of '->' must name the same dims in the same order; rearrange the dims before or after."
        raise _error(function, why, text, text.index("->"))
    moves = list(_moves(function, text, before, after))
    if len(moves) != 1:
        what = "; then ".join(map(str, moves)) or "nothing: both sides are the same"
        raise _error(function, f"A pattern is one collective, but this one is {what}.", text, text.index("->"))
    return moves[0]


def require(function: str, moved: Moved, kinds: Sequence[str], text: str) -> Moved:
    """Raise SpecError unless the collective is of one of these kinds."""
    if moved.kind not in kinds:
        fix = "vf.reshard" if moved.kind in ("own_slice", "pcast") else f"vf.{moved.kind}"
        raise _error(function, f"This pattern is {_article(moved.kind)} {moved}: write {fix}(x, '{text}').", text, 0)
    return moved


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _moves(function: str, text: str, before: Spec, after: Spec) -> Iterator[Moved]:
    """The collectives between two layouts of the same dims."""
    joined: list[tuple[int, tuple[str, ...]]] = []
    cut: list[tuple[int, tuple[str, ...]]] = []
    for dim, inner, old, new in _slots(before, after):
        if old == new:
            continue
        grown, shrunk = new[: len(old)] == old, old[: len(new)] == new
        if inner:
            why = "moves a factor that does not lead its dim; split the dim with x.unflatten first"
            raise _error(function, f"This pattern {why}.", text, 0)
        if not grown and not shrunk:
            why = f"The axes of dim {dim} change from {axes_text(old)} to {axes_text(new or ('none',))}"
            raise _error(function, f"{why}: only the last ones can come or go. Use vf.ppermute first.", text, 0)
        (cut if grown else joined).append((dim, new[len(old) :] if grown else old[len(new) :]))
    summed = _axes(before, "sum", but=after)
    reduced = _axes(after, "ct", but=before)
    for dim, axes in list(joined):
        partner = next((c for c in cut if c[1] == axes), None)
        if partner:
            cut.remove(partner)
            joined.remove((dim, axes))
            yield Moved("all_to_all", axes, dim, partner[0], before=before)
    for dim, axes in joined:
        yield Moved("all_gather", axes, dim, reduced=set(axes) <= set(reduced), before=before)
    for dim, axes in cut:
        whole = set(axes) <= set(summed)
        summed = tuple(a for a in summed if not whole or a not in axes)
        yield Moved("psum_scatter" if whole else "own_slice", axes, dim, before=before)
    if summed:
        yield Moved("psum", summed, before=before)
    pending = _axes(after, "sum", but=before)
    if pending:
        yield Moved("pcast", pending, before=before)
    alone = tuple(a for a in reduced if not any(a in axes for _, axes in joined))
    if alone:
        yield Moved("pcast", alone, reduced=True, before=before)


def _slots(before: Spec, after: Spec) -> Iterator[tuple[int, bool, tuple[str, ...], tuple[str, ...]]]:
    """For each place that axes can divide: its dim, whether something in the dim is major to it, its axes on both
    sides."""
    open_at = before.dims.index("...") if "..." in before.dims else len(before.dims)
    for i, (a, b) in enumerate(zip(before.dims, after.dims)):
        dim = i if i < open_at else i - len(before.dims)
        if isinstance(a, Factor) and isinstance(b, Factor):
            yield dim, False, a.axes, b.axes
        elif isinstance(a, Group) and isinstance(b, Group):
            yield dim, False, a.axes, b.axes
            for j, (f, g) in enumerate(zip(a.factors, b.factors)):
                yield dim, j > 0, f.axes, g.axes


def _bare(dim: Dim) -> Dim:
    """A dim without its axes."""
    if isinstance(dim, Group):
        return replace(dim, axes=(), factors=tuple(replace(f, axes=()) for f in dim.factors))
    return replace(dim, axes=()) if isinstance(dim, Factor) else dim


def _axes(spec: Spec, kind: str, but: Spec) -> tuple[str, ...]:
    """Axes with an entry of this kind, which the other side does not have."""
    other = {a for e in but.state if e.kind == kind for a in e.axes}
    return tuple(a for e in spec.state if e.kind == kind for a in e.axes if a not in other)


def _error(function: str, message: str, text: str, at: int) -> SpecError:
    return SpecError(f"vf.{function}: {message}", text, at)
