"""`shard_map`: a function of what one rank holds, run on all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vescale_fn.arguments import parameters_of
from vescale_fn.array import Array
from vescale_fn.regions import texts
from vescale_fn.regions.casts import bring, changes, enter, recast
from vescale_fn.regions.infer import boundary_states
from vescale_fn.regions.marks import states_of
from vescale_fn.regions.moves import Edges, ToGlobal
from vescale_fn.regions.ops import boundary_layout, global_shape
from vescale_fn.regions.rank_tensor import AtOnce
from vescale_fn.regions.region import Region, current_region, inside
from vescale_fn.regions.states import UNCHECKED, I, R, State, U, V
from vescale_fn.regions.texts import RegionError
from vescale_fn.sharding.forms import Sizes
from vescale_fn.sharding.layout import Partial, Ragged, Shard
from vescale_fn.sharding.mesh import Mesh, MeshShape
from vescale_fn.sharding.sizes import check_rank
from vescale_fn.sharding.spec import Indivisible, Spec, SpecError, check_axes
from vescale_fn.shardings import specs_for
from vescale_fn.tracing import current_trace
from vescale_fn.tree import flatten_with_paths, unflatten

Given = tuple[Spec | None, Sizes]  # what is said of a leaf
WHOLE = Spec(("...",))


def shard_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Collection[str] | None = None,
    check_vma: bool = True,
    **wrong: Any,
) -> Any:
    """A function of what one rank holds, as a function of global values: each rank runs `fn` on its parts of the
    arguments. A decorator, or a call. It works inside pjit, under every transform of torch.func, inside another
    shard_map over other axes, and by itself, where it runs at once on all ranks.

    mesh: where to run; inside pjit, and when an argument is an Array, it is known.
    in_specs: a tuple with a prefix tree of specs for each argument, or one spec (or vf.rules) for all. An axis that a
        spec does not name gives every rank the whole; None is a static argument, passed on as it is.
    out_specs: a prefix tree of specs for the result. An axis that a spec does not name is a promise that its ranks
        return the same value.
    axis_names: the mesh axes that are manual, by default all. The others stay with the solver, inside too.
    check_vma: whether states of values (varying, invarying, unreduced, reduced) are typed: promises are checked and
        gradients are right by construction. Without it, psum is its own transpose, and promises are taken on trust.
    Raises SpecError for specs that do not fit, and RegionError for bodies that contradict their types.

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(tp=2)
    >>> mlp = vf.shard_map(lambda x, w: vf.psum(x @ w, "tp"), mesh=mesh, in_specs=("b k/tp", "k/tp n"), out_specs="b n")
    >>> mlp(torch.ones(1, 4), torch.ones(4, 2))
    tensor([[4., 4.]])
    """
    name = getattr(fn, "__name__", "step")
    for keyword in wrong:
        if keyword in ("in_shardings", "out_shardings"):
            raise TypeError(texts.shardings_in_shard_map(name, keyword))
        raise TypeError(texts.unknown_keyword(name, keyword))

    def wrap(f: Callable[..., Any]) -> Any:
        mapped = ShardMapped(f, mesh, in_specs, out_specs, axis_names, check_vma)
        return functools.wraps(f)(lambda *args, **kwargs: mapped(*args, **kwargs))

    return wrap if fn is None else wrap(fn)


@dataclass(frozen=True, eq=False)
class ShardMapped:
    """A function under shard_map."""

    fn: Callable[..., Any]
    mesh: Mesh | None
    in_specs: Any
    out_specs: Any
    axis_names: Collection[str] | None
    checked: bool

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise TypeError(texts.keyword_arguments(self.name, list(kwargs)))
        paths, leaves, treedef = flatten_with_paths(args)
        paths = self.named(paths, len(args))
        region, arrays = self.region(paths, leaves), any(isinstance(x, Array) for x in leaves)
        specs = self.specs_of_arguments(args)
        local = self.entered(region, paths, leaves, specs)
        try:
            with inside(region):
                result = self.fn(*unflatten(treedef, local))
                out_paths, outs, out_def = flatten_with_paths(result)
                out_specs = specs_for(self.out_specs, result, f"shard_map({self.name}): out_specs")
                left = self.left(region, out_paths, outs, out_specs, arrays)
        except Exception as error:
            if region.at_once is not None and region.outer is None:
                region.at_once.failed(error)
            raise
        return unflatten(out_def, left)

    def named(self, paths: Sequence[str], count: int) -> list[str]:
        """Paths that begin with the names of the function's parameters instead of positions."""
        known = parameters_of(self.fn)[0][:count]
        names = [*known, *map(str, range(len(known), count))]
        split = (path.partition(".") for path in paths)
        return [names[int(first)] + dot + rest for first, dot, rest in split]

    # ---- the region

    def region(self, paths: Sequence[str], leaves: Sequence[Any]) -> Region:
        """The region of a call."""
        trace, outer = current_trace(), current_region()
        arrays = {p: x.mesh for p, x in zip(paths, leaves) if isinstance(x, Array)}
        around = outer.mesh if outer else trace.mesh if trace else None
        mesh = around or self.mesh or next(iter(arrays.values()), None)
        if mesh is None:
            raise RegionError(texts.no_mesh(self.name))
        if around is not None and self.mesh not in (None, around):
            raise RegionError(texts.other_mesh(self.name, self.mesh, around))
        for path, other in arrays.items():
            if other != mesh:
                raise RegionError(texts.foreign_mesh(self.name, path, mesh, other))
        manual = outer.manual if outer else {}
        names = self.axis_names if self.axis_names is not None else [a for a in mesh.axis_names if a not in manual]
        unknown = [a for a in names if a not in mesh.axis_names]
        if unknown:
            raise RegionError(texts.unknown_axis_names(self.name, unknown, mesh.axis_names))
        twice = [a for a in names if a in manual]
        if twice:
            assert outer is not None
            raise RegionError(texts.opened_twice(self.name, twice, outer.name))
        axes = tuple(a for a in mesh.axis_names if a in names)
        shape = MeshShape(axes, tuple(mesh.shape[a] for a in axes))
        at_once = AtOnce.on(mesh) if trace is None else None
        return Region(self.name, mesh, shape, self.checked, outer, at_once)

    def specs_of_arguments(self, args: tuple[Any, ...]) -> list[Given]:
        """The spec of each leaf, None where it is static."""
        specs = self.in_specs
        if type(specs) in (tuple, list):
            if len(specs) != len(args):
                raise RegionError(texts.number_of_specs(self.name, len(specs), len(args)))
            specs = tuple(specs)
        return specs_for(specs, args, f"shard_map({self.name}): in_specs")

    # ---- in and out

    def entered(self, region: Region, paths: Sequence[str], leaves: Sequence[Any], specs: Sequence[Given]) -> list[Any]:
        """What a rank sees of the arguments."""
        trace = current_trace()
        out = list(leaves)
        crossing: list[tuple[int, Any, str]] = []
        for i, (path, x, (spec, sizes)) in enumerate(zip(paths, leaves, specs, strict=True)):
            if spec is None or not isinstance(x, (Tensor, Array)):
                continue
            value = trace.bring(x) if trace is not None else x
            text = self.bound(region, f"argument {path}", "the in_spec", spec, sizes, tuple(value.shape))
            crossing.append((i, bring(region.outer, value) if region.outer is not None else value, text))
        found = enter(region, [value for _, value, _ in crossing], [text for *_, text in crossing])
        for (i, *_), local in zip(crossing, found):
            out[i] = local
        return out

    def left(
        self, region: Region, paths: Sequence[str], leaves: Sequence[Any], specs: Sequence[Given], arrays: bool
    ) -> list[Any]:
        """The global values of the outputs; Arrays where the arguments are Arrays and no trace is under way."""
        out = list(leaves)
        crossing: list[tuple[int, Tensor, str]] = []
        for i, (path, y, (spec, sizes)) in enumerate(zip(paths, leaves, specs, strict=True)):
            if isinstance(y, (Tensor, Array)):
                where = f"output {path}" if path else "the result"
                local = bring(region, y)
                text = self.bound(region, where, "the out_spec", spec or WHOLE, sizes, None, tuple(local.shape))
                axes = str(region.axes)
                expected = boundary_states(text, axes, global_shape(text, axes, local.shape))
                crossing.append((i, self.promised(region, where, local, expected), text))
        found: list[Any]
        if region.at_once is not None and arrays and region.outer is None:
            found = [region.at_once.array(y, str(region.axes), text) for _, y, text in crossing]
        else:
            parts = region.at_once.parts if region.at_once else None
            edges = Edges(tuple(ToGlobal(str(region.axes), text, parts) for *_, text in crossing))
            found = list(edges([y for _, y, _ in crossing]))
        for (i, *_), value in zip(crossing, found):
            out[i] = value
        return out

    def bound(
        self,
        region: Region,
        path: str,
        which: str,
        spec: Spec,
        sizes: Sizes,
        shape: tuple[int, ...] | None,
        local: tuple[int, ...] = (),
    ) -> str:
        """The spec as text, checked against the axes of the region and the shape."""
        what = f"shard_map({self.name}): {path}"
        sized = spec.with_sizes(sizes)
        for axis in spec.axes:
            if region.outer is not None and axis in region.outer.manual:
                raise RegionError(texts.opened_twice(self.name, [axis], region.outer.name))
            if axis in region.mesh.axis_names and axis not in region.axes:
                raise RegionError(texts.not_manual(self.name, path, which, axis, region.axes.names))
        try:
            check_axes(sized, region.axes)
            if shape is None:
                if not local and any(d != "..." for d in spec.dims):
                    raise RegionError(texts.scalar_output(self.name, path, str(spec)))
                check_rank(spec, local)
                shape = global_shape(str(sized), str(region.axes), local)
            layout = boundary_layout(str(sized), str(region.axes), shape)
        except Indivisible as e:
            raise SpecError(f"{what}: {e.fact} {texts.pad(e.fitting)}", e.text, e.at) from None
        except SpecError as e:
            raise e.within(what) from None
        for state in layout.states:
            if isinstance(state, Ragged) or (isinstance(state, Shard) and state.uneven):
                raise RegionError(texts.uneven(self.name, path, str(spec)))
            if isinstance(state, Partial) and state.kind != "sum":
                raise RegionError(texts.pending_at_edge(self.name, path, str(spec), state.kind))
        return str(sized)

    def promised(self, region: Region, path: str, y: Tensor, expected: dict[str, State]) -> Tensor:
        """The output in the states that its spec says. Raises RegionError where it cannot be in them."""
        steps = changes(states_of(y) if region.checked else dict.fromkeys(expected, UNCHECKED), expected)
        for (found, wanted), axes in steps.items():
            if found != UNCHECKED and (found, wanted) not in _LEAVES:
                broken = texts.not_a_sum if wanted == U else texts.broken_promise
                raise RegionError(broken(self.name, path, axes[0], found))
        return recast(y, steps, region)


_LEAVES = {(I, V), (R, V), (R, I), (I, R)}  # casts that an out_spec may imply
