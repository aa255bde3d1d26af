"""Where the leaves of a tree live: a spec on a mesh, rules by path, and the layouts that they give to a tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from vescale_fn.errors import one_line
from vescale_fn.sharding.bind import bind_sized, size_names
from vescale_fn.sharding.forms import Sizes, SpecLike, as_spec
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.sharding.spec import ANY, Factor, Group, Spec, SpecError
from vescale_fn.tree import broadcast_prefix, flatten_with_paths

Index = tuple[slice | tuple[slice, ...], ...]


class NamedSharding:
    """A spec on a mesh: where a tensor of any fitting shape lives. Printing keeps the user's names.

    Two are equal when they say the same of every shape: names of dims, and whole dims at the end, do not matter.

    >>> from vescale_fn.mesh import make_mesh
    >>> from vescale_fn.sharding.forms import P
    >>> mesh = make_mesh(dp=2, tp=2)
    >>> NamedSharding(mesh, "b/dp t").shard_shape((8, 3)), NamedSharding(mesh, "b/dp t") == NamedSharding(mesh, P("dp"))
    ((4, 3), True)
    """

    __slots__ = ("mesh", "sizes", "spec")

    def __init__(self, mesh: Mesh, spec: SpecLike, **sizes: int | Sequence[int]) -> None:
        parsed, own = as_spec(spec)
        self.mesh = mesh
        self.sizes: Sizes = {**own, **sizes}
        self.spec = parsed.with_sizes(self.sizes)

    def layout(self, shape: Sequence[int]) -> Layout:
        """The layout of a tensor of global `shape`. Raises SpecError when the spec does not fit."""
        return bind_sized(self.spec, tuple(shape), self.mesh.shape, self.sizes)

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part of the first rank; where shards are uneven, no rank holds more rows of a dim."""
        return self.layout(shape).max_local_shape

    def indices(self, shape: Sequence[int]) -> dict[int, Index]:
        """For each rank the part of the global tensor that it holds: one slice for each dim, or a tuple of slices where
        it holds several runs. Dims that are cut flat count as one.
        """
        layout = self.layout(shape)
        return {r: part_index(layout, c) for r, c in enumerate(self.mesh.shape.all_coords())}

    def is_equivalent_to(self, other: NamedSharding, shape: Sequence[int]) -> bool:
        """Whether both put the same parts of a tensor of this shape on the same ranks."""
        return self.mesh == other.mesh and self.layout(shape) == other.layout(shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedSharding) and (self.mesh, _meaning(self.spec)) == (
            other.mesh,
            _meaning(other.spec),
        )

    def __hash__(self) -> int:
        return hash((self.mesh, _meaning(self.spec)))

    def __repr__(self) -> str:
        return f"NamedSharding({self.mesh}: '{self.spec}')"


def part_index(layout: Layout, coords: Mapping[str, int]) -> Index:
    """The part of the global tensor that one rank holds: a slice for each dim, or a tuple of them where it has several
    runs; dims that are cut flat count as one."""
    layout = layout.flat
    runs = [[slice(*r) for r in layout.intervals(d, coords)] or [slice(0, 0)] for d in range(layout.ndim)]
    return tuple(r[0] if len(r) == 1 else tuple(r) for r in runs)


def _meaning(spec: Spec) -> tuple[Any, ...]:
    """The spec without names, and without whole dims at its end."""

    def factor(f: Factor) -> Any:
        return (f.size, f.cut, f.axes) if f.axes else f.size

    dims: list[Any] = []
    for dim in spec.dims:
        if isinstance(dim, Group):
            cut = dim.axes or any(f.axes for f in dim.factors)
            dims.append((tuple(map(factor, dim.factors)), dim.cut, dim.axes) if cut else ANY)
        else:
            dims.append(
                factor(dim) if isinstance(dim, Factor) and dim.axes else ANY if isinstance(dim, Factor) else dim
            )
    while dims and dims[-1] in (ANY, "..."):
        dims.pop()
    return (*dims, frozenset(spec.state))


# ---- rules


@dataclass(frozen=True)
class Rules:
    """Specs by path; made by `rules`. Stands wherever a tree of specs stands."""

    patterns: tuple[tuple[str, SpecLike], ...]
    sizes: tuple[tuple[str, Any], ...] = field(default=())

    def specs(self, tree: Any) -> list[SpecLike]:
        """The spec of each leaf, in leaf order. Raises ValueError for a rule or a leaf that nothing matches."""
        paths, leaves, _ = flatten_with_paths(tree)
        return self.match(paths, leaves)

    def match(self, paths: Sequence[str], leaves: Sequence[Any]) -> list[SpecLike]:
        """The spec of each of these leaves."""
        for pattern, _ in self.patterns:
            if pattern != "*" and not any(matches(p, pattern) for p in paths):
                raise ValueError(f"rules: '{pattern}' matches no leaf. The leaves are: {five(paths)}.")
        found = [self._first(p, leaf) for p, leaf in zip(paths, leaves)]
        lost = [p for p, spec in zip(paths, found) if spec is None]
        if lost:
            raise ValueError(
                f"rules: no rule matches {five(lost)}. Add rules for them, or end with '*': '...', which keeps the "
                "rest whole."
            )
        return [s for s in found if s is not None]

    def _first(self, path: str, leaf: Any) -> SpecLike | None:
        if not getattr(leaf, "shape", ()):  # a leaf without dims is whole
            return ""
        return next((spec for pattern, spec in self.patterns if matches(path, pattern)), None)

    def table(self, tree: Any, mesh: Mesh) -> str:
        """Path, shape, spec and MiB per rank of each leaf, as a table."""
        paths, leaves, _ = flatten_with_paths(tree)
        rows = [("path", "shape", "spec", "MiB per rank")]
        for path, leaf, (layout, spec) in zip(paths, leaves, layouts_for(self, tree, mesh, what="rules")):
            size = layout.max_local_numel * getattr(getattr(leaf, "dtype", None), "itemsize", 0)
            rows.append((path, str(list(layout.shape)), f"'{spec or ''}'", f"{size / 2**20:.2f}"))
        width = [max(len(r[i]) for r in rows) for i in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(r[:3], width)), r[3].rjust(width[3])]) for r in rows]
        return "\n".join(lines)


def rules(patterns: Mapping[str, SpecLike], **sizes: int | Sequence[int]) -> Rules:
    """Specs for the leaves of a tree by globs that match the end of their dotted paths; the first that matches wins.

    Leaves without dims are whole. A glob that matches nothing, and a leaf that no glob matches, is an error.

    >>> import torch
    >>> params = {"blocks": [{"w_qkv": torch.empty(4, 24)}], "wte": torch.empty(8, 4)}
    >>> rules({"wte": "v/tp d", "*.w_qkv": "d (qkv h/tp k)"}, qkv=3, h=4).specs(params)
    ['d (qkv h/tp k)', 'v/tp d']
    """
    for spec in patterns.values():
        as_spec(spec)  # a malformed spec is an error where it is written
    return Rules(tuple(patterns.items()), tuple((k, v if isinstance(v, int) else tuple(v)) for k, v in sizes.items()))


def matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


def five(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return one_line([f"'{p}'" for p in paths[:5]]) + more


# ---- layouts of a tree

Placed = tuple[Layout, Spec | None]


def layouts_for(
    specs: Any, tree: Any, mesh: Mesh, what: str = "device_put", **sizes: int | Sequence[int]
) -> list[Placed]:
    """Layout and spec of each leaf of `tree`, in leaf order.

    specs: a prefix tree of spec strings, P, S, NamedSharding, Rules and None. Where it is None, and for leaves that
        have no shape, the layout is whole and the spec None. The specs that come back carry their sizes inline.
    what: what was asked, for messages.
    sizes: sizes of the factors that specs name.
    Raises SpecError, with the path of the leaf, when a spec does not fit.
    """
    paths, leaves, _ = flatten_with_paths(tree)
    above = broadcast_prefix(specs, tree, what=f"{what}: the specs")
    placed: list[Placed] = []
    used: set[str] = set()
    for path, leaf, (asked, own) in zip(paths, leaves, _asked(above, paths, leaves)):
        where = f"{what}: {path or 'the tensor'}"
        try:
            spec, inner = _parsed(asked, mesh)
            given = {**sizes, **own, **inner}
            used |= size_names(spec) if spec is not None else set()
            placed.append(_placed(spec, leaf, mesh, given))
        except SpecError as e:
            raise e.within(where) from None
        except TypeError as e:
            raise TypeError(f"{where}: {e}") from None
    unused = [k for k in sizes if k not in used]
    if unused and used:
        raise ValueError(
            f"{what}: the sizes {one_line(unused)} name no factor of the specs, which are: {one_line(sorted(used))}."
        )
    return placed


def specs_for(specs: Any, tree: Any, what: str) -> list[tuple[Spec | None, Sizes]]:
    """Spec of each leaf of `tree`, and the sizes that come with it; None where the prefix tree of specs says None."""
    paths, leaves, _ = flatten_with_paths(tree)
    found: list[tuple[Spec | None, Sizes]] = []
    for path, (asked, own) in zip(paths, _asked(broadcast_prefix(specs, tree, what=what), paths, leaves)):
        try:
            spec, inner = (None, {}) if asked is None else as_spec(asked)
        except SpecError as e:
            raise e.within(f"{what}: {path or 'the tensor'}") from None
        found.append((spec, {**own, **inner}))
    return found


def _asked(above: Sequence[Any], paths: Sequence[str], leaves: Sequence[Any]) -> Iterator[tuple[Any, Sizes]]:
    """What stands over each leaf, rules applied, and the sizes that come with the rules."""
    by_rules: dict[Rules, Iterator[SpecLike]] = {}
    for r in dict.fromkeys(s for s in above if isinstance(s, Rules)):
        under = [i for i, s in enumerate(above) if s == r]
        by_rules[r] = iter(r.match([paths[i] for i in under], [leaves[i] for i in under]))
    for asked in above:
        yield (next(by_rules[asked]), dict(asked.sizes)) if isinstance(asked, Rules) else (asked, {})


def _parsed(asked: Any, mesh: Mesh) -> tuple[Spec | None, Sizes]:
    """The spec that is asked for, and its own sizes."""
    if asked is None:
        return None, {}
    if not isinstance(asked, NamedSharding):
        return as_spec(asked)
    if asked.mesh != mesh:
        raise SpecError(f"{asked!r} is on another mesh than the one in use, {mesh}.")
    return asked.spec, asked.sizes


def _placed(spec: Spec | None, leaf: Any, mesh: Mesh, sizes: Sizes) -> Placed:
    """Layout of one leaf, and its spec with sizes inline; whole where there is no spec, or no shape."""
    shape = tuple(getattr(leaf, "shape", ()))
    if spec is None or not hasattr(leaf, "shape"):
        return Layout.of(mesh.shape, shape), None
    return bind_sized(spec, shape, mesh.shape, sizes), spec.with_sizes(sizes)
