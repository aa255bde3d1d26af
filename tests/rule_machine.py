"""Proves factor rules by running them: every sharding that a rule admits, on virtual ranks, against the whole op.

A sharded letter is a slice of that factor, a partial value is a random split of the whole one. Each rank runs the
operation on its parts; the results are put together as the rule says and compared with the operation on the whole
tensors. Nothing here uses the product's own layouts: what it means to shard a letter is defined below in a few lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from op_samples import Sample

from vescale_fn.sharding.graph import Eqn, Var, map_vars, op_name
from vescale_fn.sharding.layout import Kind, chunk
from vescale_fn.sharding.rules.registry import bound_args
from vescale_fn.sharding.rules.rule import Dims, Rule

aten = torch.ops.aten

ONE_AXIS = [(2,), (3,)]
TWO_AXES = [(2, 2)]


@dataclass(frozen=True)
class Choice:
    """What one mesh axis does: shards a letter, or (without one) holds some operands as partial values."""

    letter: str = ""
    partial: frozenset[int] = frozenset()
    kind: Kind = "sum"

    def __str__(self) -> str:
        return self.letter or f"partial {self.kind} in {sorted(self.partial)}"


@dataclass(frozen=True)
class Case:
    """A mesh and a choice for each of its axes."""

    sizes: tuple[int, ...]
    choices: tuple[Choice, ...]

    @property
    def coords(self) -> list[tuple[int, ...]]:
        """Coordinates of the ranks, in rank order."""
        return list(product(*map(range, self.sizes)))

    def axes_of(self, letter: str) -> list[int]:
        return [i for i, c in enumerate(self.choices) if c.letter == letter]

    def __str__(self) -> str:
        return " x ".join(f"{c} over {n} ranks" for n, c in zip(self.sizes, self.choices))


@dataclass(frozen=True)
class LocalCall:
    """One rank's part of an equation: local arguments, and what the rule says of the results."""

    eqn: Eqn
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out_shapes: tuple[tuple[int, ...], ...]
    owned: Mapping[str, tuple[int, int]]  # per letter, the start and stop of what this rank holds
    rule: Rule

    def named(self) -> dict[str, Any]:
        """Local arguments by name, defaults filled in."""
        return bound_args(Eqn(self.eqn.op, self.args, self.kwargs, self.eqn.outs))


Hook = Callable[[LocalCall], Any]  # runs the operation for one rank
Runner = Callable[[Eqn, Rule, Case, list[list[torch.Tensor]]], list[list[torch.Tensor]]]
"""Runs an equation on all ranks: operands [rank][slot] to results [rank][result]."""


class Wrong(AssertionError):
    """A rule admits a sharding under which the operation gives something else."""


# --- the space of shardings -------------------------------------------------------------------------------------


def check(sample: Sample, rule: Rule, runner: Runner | None = None, meshes: Sequence[tuple[int, ...]] = ()) -> int:
    """Run every case that `rule` admits on `sample`; the number of cases. Raises Wrong at the first that fails.

    `runner`: how all ranks run the operation. The one given here by default calls it on each rank, with arguments
    changed by the hooks below; operations that need a mask have no hook, and their `masked` letters are not tried.
    """
    args, kwargs = sample.tensors()
    eqn, tensors = equation(sample), _flat_tensors(args, kwargs)
    want = _results(sample.op(*args, **kwargs))
    masked = runner is not None or sample.op in HOOKS
    n = 0
    for case in cases(eqn, rule, masked, meshes or ONE_AXIS + TWO_AXES):
        n += 1
        try:
            got = run_case(eqn, rule, case, tensors, runner or by_hooks)
        except Exception as error:
            raise Wrong(f"{_title(eqn, rule)} fails with {case}: {error}") from error
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            if not _same(a, b):
                raise Wrong(f"{_title(eqn, rule)} gives another result {i} with {case}.")
    return n


def cases(eqn: Eqn, rule: Rule, masked: bool, meshes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """Each choice on one axis, each pair of choices on two."""
    options = [Choice(x) for x in rule.sizes if x not in rule.whole and (masked or x not in rule.masked)]
    options += [Choice(partial=g) for g in rule.linear if _can_be_partial(eqn, g, "sum")]
    options += [
        Choice(partial=frozenset({slot}), kind=kind)
        for slot in sorted(rule.through)
        for kind in ("sum", "max", "min")
        if _can_be_partial(eqn, {slot}, kind)
    ]
    for sizes in meshes:
        for chosen in product(options, repeat=len(sizes)):
            case = Case(sizes, chosen)
            if _admitted(rule, case):
                yield case


def _can_be_partial(eqn: Eqn, slots: Any, kind: Kind) -> bool:
    dtypes = [eqn.operands[s].dtype for s in slots]
    return not any(d is torch.bool if kind == "sum" else d.is_complex for d in dtypes)


def _admitted(rule: Rule, case: Case) -> bool:
    """A letter that does not divide must lead its dims; pending reductions of several kinds do not mix."""
    for letter in {c.letter for c in case.choices if c.letter}:
        ranks = math.prod(case.sizes[i] for i in case.axes_of(letter))
        dims = [d for t in (*rule.operands, *rule.results) for d in t if letter in d]
        if rule.sizes[letter] % ranks and any(d[0] != letter for d in dims):
            return False
    kinds = {kind_of(rule, c) for c in case.choices if any(is_pending(rule, c, r) for r in rule.results)}
    return len(kinds) < 2


def is_pending(rule: Rule, choice: Choice, result: Dims) -> bool:
    """Whether `result` is pending along an axis with this choice."""
    if not choice.letter:
        return True
    return not _has(result, choice.letter) and any(_has(t, choice.letter) for t in rule.operands)


def kind_of(rule: Rule, choice: Choice) -> Kind:
    """How results are pending along an axis with this choice, if they are."""
    return rule.reduces.get(choice.letter, "sum") if choice.letter else choice.kind


def _has(dims: Dims, letter: str) -> bool:
    return any(letter in d for d in dims)


# --- one case -----------------------------------------------------------------------------------------------------


def equation(sample: Sample) -> Eqn:
    """The sample as an equation: shapes and dtypes of its tensors and of the results."""
    args, kwargs = sample.tensors()
    outs = _results(sample.op(*args, **kwargs))

    def var(t: torch.Tensor | None) -> Var:
        return Var("x", (), type(None)) if t is None else Var("x", tuple(t.shape), t.dtype)

    return Eqn(sample.op, _map_tensors(args, var), _map_tensors(kwargs, var), tuple(map(var, outs)))


def run_case(eqn: Eqn, rule: Rule, case: Case, tensors: list[torch.Tensor], runner: Runner) -> list[Any]:
    """Distribute the tensors, run on every rank, put the results together."""
    generator = torch.Generator().manual_seed(0)
    held = [_distribute(rule, case, slot, t, generator) for slot, t in enumerate(tensors)]
    outs = runner(eqn, rule, case, [[h[rank] for h in held] for rank, _ in enumerate(case.coords)])
    return [
        _assemble(rule, case, i, [o[i] for o in outs]).reshape(v.shape) if v.is_tensor else None
        for i, v in enumerate(eqn.outs)
    ]


def by_hooks(eqn: Eqn, rule: Rule, case: Case, held: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The operation itself on each rank, or its hook."""
    outs = []
    for coord, tensors in zip(case.coords, held):
        owned = {x: _owned(rule, case, x, coord) for x in rule.sizes}
        parts = iter(tensors)
        args, kwargs = map_vars((eqn.args, eqn.kwargs), lambda v, parts=parts: next(parts))
        shapes = tuple(_local_shape(r, owned) for r in rule.results)
        outs.append(_results(HOOKS.get(eqn.op, _plain)(LocalCall(eqn, args, kwargs, shapes, owned, rule))))
    return outs


def _owned(rule: Rule, case: Case, letter: str, coord: Sequence[int]) -> tuple[int, int]:
    """The run of `letter` that a rank holds: cut like torch.chunk, axis after axis."""
    start, size = 0, rule.sizes[letter]
    for axis in case.axes_of(letter):
        first, size = chunk(size, case.sizes[axis], coord[axis])
        start += first
    return start, start + size


def _local_shape(dims: Dims, owned: Mapping[str, tuple[int, int]]) -> tuple[int, ...]:
    return tuple(math.prod(owned[x][1] - owned[x][0] for x in d) for d in dims)


def _factors(dims: Dims) -> list[str]:
    return [x for d in dims for x in d]


def _distribute(rule: Rule, case: Case, slot: int, t: torch.Tensor, generator: torch.Generator) -> list[torch.Tensor]:
    """What each rank holds of operand `slot`."""
    whole = dict.fromkeys(case.coords, t)
    for axis, choice in enumerate(case.choices):
        if slot in choice.partial:
            split = {c[:axis]: _split(x, case.sizes[axis], choice.kind, generator) for c, x in whole.items()}
            whole = {c: split[c[:axis]][c[axis]] for c in whole}
    dims = rule.operands[slot]
    parts = []
    for c, full in whole.items():
        owned = {x: _owned(rule, case, x, c) for x in _factors(dims)}
        x = full.reshape([rule.sizes[f] for f in _factors(dims)])
        for i, f in enumerate(_factors(dims)):
            x = x.narrow(i, owned[f][0], owned[f][1] - owned[f][0])
        parts.append(x.reshape(_local_shape(dims, owned)).contiguous())
    return parts


def _split(t: torch.Tensor, n: int, kind: Kind, generator: torch.Generator) -> list[torch.Tensor]:
    """n random tensors whose sum (maximum, minimum) is t."""
    noise = [_noise(t, generator) for _ in range(n)]
    if kind == "sum":
        return [*noise[1:], t - sum(noise[1:])]
    owner = torch.randint(n, t.shape, generator=generator)
    if t.dtype is torch.bool:
        others = [t & m if kind == "max" else t | m for m in noise]
    else:
        others = [t - m.abs() if kind == "max" else t + m.abs() for m in noise]
    return [torch.where(owner == i, t, o) for i, o in enumerate(others)]


def _noise(t: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return torch.randn(t.shape, dtype=t.dtype, generator=generator)
    return torch.randint(-5, 6, t.shape, generator=generator).to(t.dtype)


def _assemble(rule: Rule, case: Case, result: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """The whole of a result: minor axes first, each sharded factor is concatenated, each partial value reduced, and
    what should be whole is compared."""
    dims = rule.results[result]
    factors = _factors(dims)
    held = {}
    for c, part in zip(case.coords, parts):
        owned = {x: _owned(rule, case, x, c) for x in factors}
        if tuple(part.shape) != _local_shape(dims, owned):
            raise Wrong(f"result {result} has local shape {list(part.shape)}, not {list(_local_shape(dims, owned))}")
        held[c] = part.reshape([owned[x][1] - owned[x][0] for x in factors])
    for axis in reversed(range(len(case.sizes))):
        choice = case.choices[axis]
        lines: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for c in sorted(held):
            lines.setdefault(c[:axis], []).append(held[c])
        if choice.letter in factors:
            at = factors.index(choice.letter)
            held = {c: torch.cat(line, at) for c, line in lines.items()}
        elif is_pending(rule, choice, dims):
            held = {c: _reduce(line, kind_of(rule, choice)) for c, line in lines.items()}
        else:
            if not all(_same(line[0], other) for line in lines.values() for other in line):
                raise Wrong(f"result {result} should be the same on all ranks")
            held = {c: line[0] for c, line in lines.items()}
    return held[()]


def _reduce(parts: list[torch.Tensor], kind: Kind) -> torch.Tensor:
    stacked = torch.stack(parts)
    if kind == "sum":
        if stacked.dtype is torch.bool:
            raise Wrong("there are no sums of bool")
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if kind == "max" else stacked.amin(0)


# --- small things -------------------------------------------------------------------------------------------------


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point or a.dtype.is_complex:
        tolerance = 1e-5 if a.dtype is torch.float32 else 1e-10
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(a, b)


def _results(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map_tensors(t, fn) for t in tree)
    return {k: _map_tensors(v, fn) for k, v in tree.items()} if isinstance(tree, dict) else tree


def _flat_tensors(*trees: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map_tensors(trees, found.append)
    return found


def _title(eqn: Eqn, rule: Rule) -> str:
    return f"{op_name(eqn.op)} {', '.join(str(list(v.shape)) for v in eqn.operands)} by {str(rule)!r}"


# --- operations whose arguments change on a rank ------------------------------------------------------------------


def _plain(call: LocalCall) -> Any:
    return call.eqn.op(*call.args, **call.kwargs)


def _with(**change: Callable[[LocalCall, dict[str, Any]], Any]) -> Hook:
    """Run the operation with some arguments replaced."""

    def hook(call: LocalCall) -> Any:
        args = call.named()
        return call.eqn.op(**{**args, **{name: make(call, args) for name, make in change.items()}})

    return hook


def _out_shape(call: LocalCall, args: dict[str, Any]) -> tuple[int, ...]:
    return call.out_shapes[0]


def _reshape(call: LocalCall) -> Any:
    return call.args[0].reshape(call.out_shapes[0])


def _expand(call: LocalCall) -> Any:
    return call.args[0].expand(call.out_shapes[0])


def _split_pieces(call: LocalCall) -> Any:
    dim = call.named()["dim"]
    return torch.split(call.args[0], [s[dim] for s in call.out_shapes], dim)


def _slice(call: LocalCall) -> Any:
    args = call.named()
    dim = args["dim"] % call.args[0].dim()
    start, end = _scaled(call, args, call.eqn.operands[0].shape[dim], call.args[0].shape[dim], dim)
    return aten.slice(call.args[0], dim, start, end, args["step"])


def _slice_backward(call: LocalCall) -> Any:
    args = call.named()
    dim = args["dim"] % call.args[0].dim()
    start, end = _scaled(call, args, call.eqn.outs[0].shape[dim], call.out_shapes[0][dim], dim)
    return aten.slice_backward(call.args[0], call.out_shapes[0], dim, start, end, args["step"])


def _scaled(call: LocalCall, args: dict[str, Any], size: int, local: int, dim: int) -> tuple[Any, Any]:
    """The bounds of a slice of a dim of which this rank holds `local` of `size`: equal pieces shrink alike."""
    start, end = args["start"], args["end"]
    if local == size:
        return start, end
    first = 0 if start is None else start
    last = size if end is None else min(end, size)
    first, last = (x + size if x < 0 else x for x in (first, last))
    return first * local // size, last * local // size


def _extremum(call: LocalCall) -> Any:
    """A rank that holds nothing has the identity."""
    if call.args[0].numel():
        return _plain(call)
    lowest = call.eqn.op in (aten.amax.default, aten.max.default)
    dtype = call.args[0].dtype
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return torch.full(call.out_shapes[0], info.min if lowest else info.max, dtype=dtype)


def _unless_empty(call: LocalCall) -> Any:
    """For operations whose kernels refuse empty tensors, or get their shapes wrong."""
    if math.prod(call.out_shapes[0]):
        return _plain(call)
    return torch.empty(call.out_shapes[0], dtype=call.eqn.outs[0].dtype)


def _cut_from_whole(call: LocalCall) -> Any:
    """Made whole, then cut: for tensors whose elements depend on where they are."""
    whole = _plain(call)
    for dim, d in enumerate(call.rule.results[0]):
        for x in d:
            whole = whole.narrow(dim, call.owned[x][0], call.owned[x][1] - call.owned[x][0])
    return whole


REFUSE_EMPTY = [
    aten._fft_c2c.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
    aten.pixel_unshuffle.default,
    aten.im2col.default,
    aten.col2im.default,
]
HOOKS: Mapping[Any, Hook] = {
    **dict.fromkeys(
        [
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten._reshape_alias.default,
            aten.flatten.using_ints,
            aten.unflatten.int,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ],
        _reshape,
    ),
    aten.expand.default: _expand,
    **dict.fromkeys([aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_copy.Tensor], _split_pieces),
    **dict.fromkeys(
        [aten.split_with_sizes.default, aten.unsafe_split_with_sizes.default, aten.split_with_sizes_copy.default],
        _split_pieces,
    ),
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.diagonal_backward.default: _with(input_sizes=_out_shape),
    aten.unfold_backward.default: _with(input_sizes=_out_shape),
    aten.full.default: _with(size=_out_shape),
    aten.zeros.default: _with(size=_out_shape),
    aten.ones.default: _with(size=_out_shape),
    **dict.fromkeys(REFUSE_EMPTY, _unless_empty),
    **dict.fromkeys([aten.amax.default, aten.amin.default, aten.max.default, aten.min.default], _extremum),
    **dict.fromkeys(
        [
            aten.arange.default,
            aten.arange.start,
            aten.arange.start_step,
            aten.linspace.default,
            aten.eye.default,
            aten.eye.m,
            aten.tril_indices.default,
            aten.triu_indices.default,
        ],
        _cut_from_whole,
    ),
}
