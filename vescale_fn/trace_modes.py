"""What watches a step while it is traced: `Lift` brings in what it captures, `Record` notes lines and refuses what a
traced program cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fn import trace_errors as errors
from vescale_fn.decompositions import CALLS
from vescale_fn.functional import annotate
from vescale_fn.indexing import at_positions
from vescale_fn.regions.ops import SHAPES
from vescale_fn.regions.region import note
from vescale_fn.sharding.graph import Source, op_name
from vescale_fn.trace_errors import TraceError
from vescale_fn.tree import map_tensors

if TYPE_CHECKING:
    from vescale_fn.trace import Trace

aten = torch.ops.aten


class Lift(TorchFunctionMode):
    """Replaces tensors that were not born in the trace by the inputs that stand for them."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func, kwargs = CALLS.get(func, func), kwargs or {}
        if not self.trace.is_current:  # a sub-program is being traced
            return func(*args, **kwargs)
        if func is torch.Tensor.requires_grad_:  # how torch.func begins a gradient
            self.trace.differentiates(args[0])
        args, kwargs = map_tensors(args, self.trace.bring), map_tensors(kwargs, self.trace.bring)
        if func is torch.Tensor.__getitem__:  # x[i] would read the value of i
            return at_positions(args[0], args[1])
        return func(*args, **kwargs)


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the user's line on every node; refuses writes to captured tensors, reads of values, and random draws."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        source, backward = self.trace.lines.locate()
        if func is aten.lift_fresh.default and args[0].numel() != 1:
            out = aten.clone.default(self.trace.lift(args[0]))
        else:
            out = self._call(func, args, kwargs, source)
        for node in annotate(self.trace.graph, source, backward):
            self._check(node, source)
        note(func, args, kwargs, out, source)
        return out

    def _call(self, func: Any, args: Any, kwargs: Any, source: Source) -> Any:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        name = self.trace.fn_name
        if func is not aten.lift_fresh.default:
            args, kwargs = map_tensors(args, self.trace.bring), map_tensors(kwargs, self.trace.bring)
        if func in SHAPES and not kwargs:  # as most nodes of a region: torch takes three times as long over one
            return self.trace.operation(func, args, SHAPES[func](tuple(args[0].shape), *args[1:]))
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            raise TraceError(errors.reads_value(name, source)) from None
        except DynamicOutputShapeException as e:
            raise TraceError(errors.data_dependent_shape(name, op_name(e.func), source)) from None

    def _check(self, node: torch.fx.Node, source: Source) -> None:
        """Refuse a node that a traced program cannot have."""
        name = self.trace.fn_name
        if _is_random(node):
            raise TraceError(errors.random_without_key(name, op_name(node.target), source))
        for tensor in _written(node):
            what = self.trace.owner(tensor)
            if what:
                raise TraceError(errors.writes_captured(name, what, op_name(node.target), source))


def _written(node: torch.fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node writes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    arguments = node.target._schema.arguments
    given = {**dict(zip([a.name for a in arguments], node.args)), **node.kwargs}
    for a in arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            value = given.get(a.name)
            for n in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(n, torch.fx.Node):
                    yield n.meta["val"]


def _is_random(node: torch.fx.Node) -> bool:
    """Whether the node draws random numbers. Attention is tagged as random, but draws only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return bool(given.get("dropout_p", "dropout_p" not in names))
