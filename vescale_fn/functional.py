"""Writes in place, and strides, become values: a second trace over the traced graph, through torch.func.functionalize.

It runs after torch.func is traced away, because functionalize refuses the autograd Functions of our primitives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from vescale_fn import strided
from vescale_fn.sharding.graph import Call, Scan, Source


def is_functional(gm: GraphModule) -> bool:
    """Whether no operation of the graph writes to one of its operands, or depends on how they lie in memory."""
    ops = [n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return not any(op._schema.is_mutable or op in strided.DECOMPOSITIONS for op in ops)


def functionalized(gm: GraphModule, decompositions: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """The same graph without writes and strides; lines and phases carried over."""
    from torch.fx.experimental.proxy_tensor import make_fx

    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]

    def run(*args: Any) -> Any:
        return _Replay(gm).run(*args)

    pure = torch.func.functionalize(run, remove="mutations")
    return make_fx(pure, {**decompositions, **strided.DECOMPOSITIONS}, tracing_mode="fake")(*values)


class _Replay(Interpreter):
    """Runs a traced graph under functionalize."""

    def __init__(self, gm: GraphModule) -> None:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        super().__init__(gm)
        mode = get_proxy_mode()
        assert mode is not None
        self.tracer: Any = mode.tracer
        self.current: Any = None

    def run_node(self, n: Node) -> Any:
        self.current = n
        result = super().run_node(n)
        annotate(self.tracer.graph, n.meta.get("source", Source()), n.meta.get("backward", False))
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A sub-program is no torch operation: its operands are unwrapped, its results wrapped by hand."""
        if not isinstance(target, SubProgram):
            return super().call_function(target, args, kwargs)
        level = torch._C._functorch.maybe_current_level()
        assert level is not None
        operands = [_unwrapped(a) for a in args]
        with unseen():
            fakes = [torch.empty_like(v) for v in self.current.meta["val"]]
            record_call(self.tracer, target.op, operands, fakes)
        return [torch._C._functorch._wrap_functional_tensor(t, level) for t in fakes]


def _unwrapped(value: Any) -> Any:
    """The tensor below a functionalize wrapper, writes applied."""
    if not isinstance(value, torch.Tensor) or not torch._is_functional_tensor(value):
        return value
    torch._sync(value)  # type: ignore[attr-defined,no-untyped-call]
    return torch._C._functorch._unwrap_functional_tensor(value, True)


# ---- nodes of a trace under way


@dataclass(frozen=True, eq=False)
class SubProgram:
    """The target of a node that stands for a sub-program: torch.fx wants a callable with a name."""

    op: Scan | Call

    __name__ = "sub_program"

    def __call__(self, *operands: Any) -> Any:
        raise NotImplementedError("a sub-program is evaluated from its Graph")


def annotate(graph: torch.fx.Graph, source: Source, backward: bool) -> list[Node]:
    """Mark the nodes made since the last operation (arithmetic on numbers included) with line and phase."""
    new = []
    node = graph._root.prev
    while node.op in ("call_function", "get_attr") and "source" not in node.meta:
        node.meta["source"], node.meta["backward"] = source, backward
        new.append(node)
        node = node.prev
    return new[::-1]


def record_call(tracer: Any, op: Scan | Call, operands: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
    """A node for a sub-program; `results` stand for what it returns."""
    from torch.fx.experimental.proxy_tensor import track_tensor_tree

    proxies = tuple(map(tracer.unwrap_proxy, operands))
    name = "scan" if isinstance(op, Scan) else op.name
    proxy = tracer.create_proxy("call_function", SubProgram(op), proxies, {}, name=name)
    track_tensor_tree(list(results), proxy, constant=None, tracer=tracer)


def record_operation(tracer: Any, op: Any, args: Sequence[Any], result: torch.Tensor, seen: torch.Tensor) -> None:
    """A node for an operation on the first of these arguments; `result` stands for what it returns, and `seen` has the
    form that it has now."""
    from torch.fx.experimental.proxy_tensor import track_tensor

    operand, *rest = args
    name = tracer.graph._target_to_str(op.overloadpacket.__name__)
    node = tracer.create_node("call_function", op, (tracer.unwrap_proxy(operand).node, *rest), {}, name)
    node.meta["val"] = seen
    track_tensor(result, tracer.proxy(node), constant=None, tracer=tracer)


@contextlib.contextmanager
def outside_transforms() -> Iterator[list[Any]]:
    """Neither the transforms of torch.func nor the dispatch modes see what happens inside. Yields the transforms that
    were under way."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with temporarily_clear_interpreter_stack() as levels, _disable_current_modes():
        yield levels or []


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Nobody sees what happens inside: no transform, no dispatch mode, no function mode."""
    with outside_transforms(), torch._C.DisableTorchFunction():
        yield
