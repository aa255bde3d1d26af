"""Casts inserted above autograd, so that a gradient meets the transpose of each: a value that all ranks share and that
meets one that varies is cast first, and its gradient is summed over the ranks.

The mode only inserts; what a finished graph means is decided in `check`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from vescale_fn.array import Array
from vescale_fn.indexing import at_positions
from vescale_fn.regions import ops, texts
from vescale_fn.regions.infer import Unreduced
from vescale_fn.regions.marks import states_of
from vescale_fn.regions.moves import Cast, Edges, ToLocal
from vescale_fn.regions.region import Region, current_region, inside
from vescale_fn.regions.states import COTANGENT, UNCHECKED, I, R, State, States, U, V, join
from vescale_fn.source import user_source
from vescale_fn.tracing import current_trace
from vescale_fn.tree import map_tensors

# What reads nothing but the form of a tensor, which is the same inside and outside.
_METADATA = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ["shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout"]
        ),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.stride),
    }
)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward)
# What speaks of the tensor that it is given, not of its values: nothing may stand for that one.
_ABOUT_ITSELF = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class InsertCasts(TorchFunctionMode):
    """Brings in what the region closes over, and casts the operands of each function to one state per axis."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region
        self.trace = current_trace()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            return func(*args, **kwargs)
        elsewhere = current_trace() is not self.trace  # a sub-program enters the region by itself
        if func in _ABOUT_ITSELF and not elsewhere:
            follow(self.region, args[0])
        if elsewhere or ops.is_ours(func) or _is_own_function(args) or func in _ABOUT_ITSELF:
            return func(*args, **kwargs)
        if args and _is_function(args[0]):
            args = (within(self.region, args[0]), *args[1:])
        if func in _GRADIENTS:
            check_losses(args[0] if args else kwargs.get("outputs", kwargs.get("tensors")))
            return func(*args, **kwargs) if len(args) < 2 else gradients(self.region, func, *args, **kwargs)
        args, kwargs = (map_tensors(t, lambda x: bring(self.region, x), (Tensor, Array)) for t in (args, kwargs))
        found: list[Tensor] = []
        map_tensors((args, kwargs), found.append)
        if len(found) > 1 and self.region.checked:
            targets = self._targets(func, found)
            if targets:
                args, kwargs = (map_tensors(t, lambda x: self._cast(func, x, targets, found)) for t in (args, kwargs))
        try:
            if func is Tensor.__getitem__ and self.region.at_once is not None:
                return at_positions(args[0], args[1])
            return func(*args, **kwargs)
        except Unreduced as e:
            names = [name_of(x) for x in found if (states_of(x) or {}).get(e.axis) == U]
            raise texts.RegionError(texts.unreduced(_function(func), names, e.axis, user_source())) from None

    def _targets(self, func: Any, found: Sequence[Tensor]) -> dict[str, State]:
        """The state, per axis, that operands are cast to, where they differ."""
        targets: dict[str, State] = {}
        by_tensor = [states_of(x) or {} for x in found]
        for axis in self.region.manual:
            states = {s.get(axis, I) for s in by_tensor}
            if len(states) == 1:
                continue
            if U in states:
                self._check_mixed(func, found, axis)
                targets[axis] = R  # what meets parts of a sum without a gradient of its own
            else:
                targets[axis] = join(states)
        return targets

    def _check_mixed(self, func: Any, found: Sequence[Tensor], axis: str) -> None:
        """Parts of a sum may meet values whose gradient is parts of a sum, and what has no gradient."""
        summed = [x for x in found if (states_of(x) or {}).get(axis) == U]
        for x in found:
            state = (states_of(x) or {}).get(axis, I)
            if state == V or (state == I and x.is_floating_point()):
                raise texts.RegionError(
                    texts.mixed(_function(func), name_of(summed[0]), name_of(x), state, axis, user_source())
                )

    def _cast(self, func: Any, x: Tensor, targets: Mapping[str, State], found: Sequence[Tensor]) -> Tensor:
        """x in the target states."""
        steps = {s: axes for s, axes in changes(states_of(x), targets).items() if s[0] != U}
        if steps and _writes(func) and x is found[0]:
            (step, axes), *_ = steps.items()
            raise texts.RegionError(texts.cast_in_place(_function(func), name_of(x), step, axes, user_source()))
        return recast(x, steps, self.region)


def bring(region: Region, x: Any) -> Tensor:
    """x, or what stands in the region for it if it is closed over: the whole value, once."""
    states = states_of(x)
    if isinstance(x, Tensor) and states is not None and region.manual.keys() <= states.keys():
        return x
    trace = current_trace()
    x = trace.bring(x) if trace is not None and isinstance(x, Array) else x
    key = id(x), id(trace)  # what enters inside a loop does not live outside it
    if key not in region.entered:
        region.entered[key] = x, _batch(region, x) if _is_batch_of_variable(region, x) else enter_whole(region, x)
    return region.entered[key][1]


def _is_batch_of_variable(region: Region, x: Any) -> bool:
    functorch = torch._C._functorch
    batched = isinstance(x, Tensor) and functorch.is_batchedtensor(x)
    return batched and id(functorch.get_unwrapped(x)) in region.variables


def _batch(region: Region, x: Tensor) -> Tensor:
    """What vmap makes of a variable of a derivative taken in the region, of what stands for that one."""
    functorch = torch._C._functorch
    _, variable = region.variables[id(functorch.get_unwrapped(x))]
    batch: Tensor = functorch._add_batch_dim(variable, functorch.maybe_get_bdim(x), functorch.maybe_get_level(x))
    return batch


def follow(region: Region, x: Tensor) -> None:
    """x, closed over, becomes the variable of a derivative taken in the region: what each rank holds of it does, or the
    gradient would be that of the global value, which is another where types are not checked."""
    functorch = torch._C._functorch
    if not functorch.is_gradtrackingtensor(x) or region.manual.keys() <= (states_of(x) or {}).keys():
        return
    level = functorch.maybe_get_level(x)
    local = bring(region, functorch.get_unwrapped(x))
    if functorch.maybe_get_level(local) == level:  # it entered just now, within the derivative
        local = functorch.get_unwrapped(local)
    variable = functorch._wrap_for_grad(local, level).requires_grad_()
    region.entered[id(x), id(current_trace())] = region.variables[id(x)] = x, variable


def gradients(region: Region, grad: Any, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
    """Gradients with respect to inputs, and to the variables that stand for some of them in the region."""
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    found = {i: region.variables[id(x)][1] for i, x in enumerate(given) if id(x) in region.variables}
    if not found:
        return grad(outputs, inputs, *rest, **options)
    every = list(grad(outputs, (*given, *found.values()), *rest, **{**options, "allow_unused": True}))
    for i, of_variable in zip(found, every[len(given) :]):
        if of_variable is not None and every[i] is not None:  # where a transform made another value of it: as a whole
            whole = bring(region, every[i])
            of_variable = of_variable + recast(whole, changes(states_of(whole), states_of(of_variable) or {}), region)
        every[i] = every[i] if of_variable is None else of_variable
    return tuple(every[: len(given)])


def cast(x: Tensor, axes: Sequence[str], states: str, region: Region) -> Tensor:
    """The same value in another state along these axes."""
    return Cast(axes_with_sizes(region, axes), states)(x)


Changes = Mapping[tuple[State, State], Sequence[str]]  # (state, target) -> the axes that change so


def changes(states: States | None, targets: Mapping[str, State]) -> dict[tuple[State, State], list[str]]:
    """What brings a value of these states into the target states; axes that change alike change together."""
    found: dict[tuple[State, State], list[str]] = {}
    for axis, target in targets.items():
        state = (states or {}).get(axis, I)
        if state != target:
            found.setdefault((state, target), []).append(axis)
    return found


def recast(x: Tensor, steps: Changes, region: Region) -> Tensor:
    """x after these changes."""
    for (before, after), axes in steps.items():
        x = cast(x, axes, f"{before}->{after}", region)
    return x


def carried(path: str, before: Any, after: Any) -> Any:
    """What a loop hands on, in the state in which it came. Raises RegionError where that says less than it is."""
    region = current_region()
    if region is None or not region.checked or not isinstance(after, Tensor):
        return after
    after = bring(region, after)
    for axis, state in (states_of(before) or {}).items():
        now = (states_of(after) or {}).get(axis, I)
        if now == state:
            continue
        if U in (now, state) or join([now, state]) != state:
            raise texts.RegionError(texts.carry_state(path, axis, state, now))
        after = cast(after, [axis], f"{now}->{state}", region)
    return after


def axes_with_sizes(region: Region, axes: Sequence[str]) -> str:
    """`dp=2,tp=4`."""
    return ",".join(f"{a}={region.manual[a]}" for a in axes)


def enter_whole(region: Region, x: Any) -> Tensor:
    """A closed-over value inside: whole on every axis of the region (and of those around it, where it is foreign to
    them too)."""
    if region.outer is not None:
        states = states_of(x)
        if states is None or not region.outer.manual.keys() <= states.keys():
            x = enter_whole(region.outer, x)
    return enter(region, [x], ["..."])[0]


def enter(region: Region, values: Sequence[Any], specs: Sequence[str]) -> list[Tensor]:
    """Values enter a region together. Unchecked, they have no states, and every rank contributes to their gradients."""
    axes, parts = str(region.axes), region.at_once.parts if region.at_once else None
    found = Edges(tuple(ToLocal(axes, spec, parts) for spec in specs))(values)
    if region.checked:
        return found
    unchecked: dict[str, State] = dict.fromkeys(region.axes.names, UNCHECKED)
    return [recast(x, changes(states_of(x), unchecked), region) for x in found]


def check_losses(outputs: Any) -> None:
    """A gradient starts from the cotangent 1 on every rank. For a reduced loss that would count n times."""
    for x in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
        reduced = [a for a, s in (states_of(x) or {}).items() if COTANGENT[s] == U]
        if reduced:
            raise texts.RegionError(texts.reduced_loss(reduced, user_source()))


def name_of(x: Tensor) -> str:
    """What the user's code calls a tensor, if a variable in a frame under way holds it."""
    frame = sys._getframe(1)
    while frame is not None:
        for name, value in frame.f_locals.items():
            if value is x and name.isidentifier() and not _in_package(frame.f_code.co_filename):
                return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _in_package(file: str) -> bool:
    return "/vescale_fn/" in file or "/torch/" in file


def _is_own_function(args: Any) -> bool:
    """Whether this is the call of an autograd Function of this package: torch.func makes an operator of it."""
    return bool(args) and _is_function(args[0]) and args[0].__module__.startswith("vescale_fn.")


def _is_function(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.autograd.Function)


def within(region: Region, function: type) -> type:
    """The autograd Function of a user, whose derivatives run in the region too, even when it is over by then."""

    def entered(rule: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with inside(region):
                return rule(*args, **kwargs)

        return staticmethod(run)

    rules = [name for name in ("backward", "jvp") if name in _defined(function)]
    return type(function.__name__, (function,), {name: entered(getattr(function, name)) for name in rules})


def _defined(function: type) -> set[str]:
    """What a Function defines itself, or inherits from one that does."""
    return {name for base in function.__mro__ if base.__module__ != "torch.autograd.function" for name in vars(base)}


def _function(func: Any) -> str:
    name = str(resolve_name(func) or getattr(func, "__name__", func))
    return name.removesuffix(".__get__")


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
