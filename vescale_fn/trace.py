"""Trace: from a step function to one flat `Graph` that holds forward, backward and update, with global shapes.

torch.func is traced away; every equation knows the user's line. Tensors and Arrays that the step captures become extra
inputs. Float arguments stay numbers (SymFloat) so that number promotion is kept.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vescale_fn import trace_errors as errors
from vescale_fn.array import Array
from vescale_fn.functional import annotate, functionalized, is_functional, record_call, record_operation, unseen
from vescale_fn.fx_graph import graph_of_fx
from vescale_fn.names import identifier
from vescale_fn.regions.marks import mark, states_of
from vescale_fn.sharding.graph import Graph, Var
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.shardings import NamedSharding
from vescale_fn.source import Lines, source_of_traceback
from vescale_fn.trace_errors import TraceError
from vescale_fn.trace_modes import Lift, Record
from vescale_fn.tracing import CURRENT, Aval, Traced, aval_of, sharding_of, wrappers

# What torch traces with is imported by the functions that use it, so that importing the package stays cheap.

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


def trace_flat(
    fn: Callable[..., Sequence[Any]],
    avals: Sequence[Aval | float],
    *,
    names: Sequence[str] | None = None,
    fn_name: str = "step",
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    mesh: Mesh | None = None,
    shardings: Sequence[NamedSharding | None] = (),
) -> Traced:
    """Trace `fn`, which takes tensors and floats and returns a flat list of leaves.

    avals: an Aval for a tensor argument, a value for a float argument (a decision that depends on it makes it static).
    names: of the arguments, by default x0, x1, ...
    mesh: what regions in fn run on.
    shardings: of the arguments, where they are known: what `sharding_of` says of them.
    Raises TraceError, with the user's line, where the step cannot be traced; an exception of the step itself is
    raised as it is, with a note.

    >>> traced = trace_flat(lambda x, lr: [x - lr * x.sin()], [Aval((3,), torch.float32), 0.1], names=["x", "lr"])
    >>> print(traced.graph)
    inputs x:f32[3], lr:float[]
      sin:f32[3] = aten.sin(x)
      mul:f32[3] = aten.mul.Tensor(sin, lr)
      sub:f32[3] = aten.sub.Tensor(x, mul)
    return sub
    """
    given = tuple(names) if names is not None else tuple(f"x{i}" for i in range(len(avals)))
    floats = frozenset(i for i, a in enumerate(avals) if isinstance(a, float))

    def attempt(static: frozenset[int]) -> tuple[Traced, frozenset[int]]:
        return Trace(fn_name, decompositions or {}, mesh=mesh, shardings=shardings).run(fn, avals, given, static)

    try:
        traced, needed = attempt(frozenset())
    except TraceError:
        raise
    except Exception:
        if not floats:
            raise
        needed = floats  # a SymFloat does not do everything that a float does, f"{lr:.2f}" for one
    if needed:
        traced, _ = attempt(needed)
        warnings.warn(errors.float_became_static(fn_name, ", ".join(given[i] for i in sorted(needed))), stacklevel=2)
    return traced


class Trace:
    """The trace of one function, while it is under way."""

    def __init__(
        self,
        fn_name: str,
        decompositions: Mapping[Any, Callable[..., Any]],
        parent: Trace | None = None,
        transforms: int = 0,
        mesh: Mesh | None = None,
        shardings: Sequence[NamedSharding | None] = (),
    ) -> None:
        """parent: the trace in which this one, of a sub-program, runs. transforms: how many of torch.func are under way
        there. shardings: of the arguments, where they are known."""
        self.fn_name = fn_name
        self.mesh: Mesh | None = parent.mesh if parent else mesh
        self.parent = parent
        self.shardings = shardings
        self.placed: dict[int, NamedSharding] = {}  # by id: what came with a sharding
        self.depth: int = transforms + (parent.depth if parent else 0)  # of wrappers that transforms outside have made
        self._differentiated: dict[int, torch.Tensor] = {}  # by id: wrappers that a gradient inside is taken for
        self.decompositions = dict(decompositions)
        self.captured: list[Any] = []
        self.mode: FakeTensorMode = _fake_mode(parent.mode if parent else None)
        self.numbers: list[torch.SymFloat] = parent.numbers if parent else []  # those of the step
        self.lines = Lines()
        self._tracer: Any = None
        self._last_input: Any = None  # the last placeholder
        self._lifted: dict[int, torch.Tensor] = {}  # by id of the captured value
        self._given: Mapping[int, torch.Tensor] = {}
        self._owners: dict[int, str] = {}  # storages that the step must not write, and what to call them

    def run(
        self,
        fn: Callable[..., Sequence[Any]],
        avals: Sequence[Any],
        names: Sequence[str],
        static: frozenset[int] = frozenset(),
    ) -> tuple[Traced, frozenset[int]]:
        """Trace fn, with the floats in `static` as constants. Also returns the floats that were guarded on.

        avals: as in trace_flat; a number of the step that a sub-program is part of stands for itself.
        """
        token = CURRENT.set(self)
        try:
            return self._run(fn, avals, names, static)
        finally:
            CURRENT.reset(token)

    def _run(
        self, fn: Callable[..., Sequence[Any]], avals: Sequence[Any], names: Sequence[str], static: frozenset[int]
    ) -> tuple[Traced, frozenset[int]]:
        from torch.fx.experimental.proxy_tensor import make_fx

        arguments = [a if i in static else self._example(a, names[i]) for i, a in enumerate(avals)]
        dynamic = [i for i in range(len(avals)) if i not in static]
        self.numbers = self.numbers or [a for a in arguments if isinstance(a, torch.SymFloat)]
        constants: list[Any] = []

        def body(*values: Any) -> list[Any]:
            inside = dict(enumerate(arguments)) | dict(zip(dynamic, values, strict=True))
            for value, i in zip(values, dynamic):
                self._own(value, f"argument {names[i]}")
                if i < len(self.shardings) and (sharding := self.shardings[i]) is not None:
                    self.placed[id(value)] = sharding
            with self._under_way():
                leaves = [self.bring(x) for x in fn(*inside.values())]
            constants[:] = [_DYNAMIC if _is_dynamic(x) else x for x in leaves]
            return [x for x in leaves if _is_dynamic(x)]

        with compiling_flag(), self.mode:  # a step without tensor arguments finds its mode here
            gm = make_fx(body, self.decompositions, tracing_mode="fake")(*[arguments[i] for i in dynamic])
        if not is_functional(gm):
            gm = functionalized(gm, self.decompositions)
        graph = graph_of_fx(gm, [names[i] for i in dynamic] + [f"captured_{i}" for i in range(len(self.captured))])
        inputs = [*graph.inputs]
        for i in sorted(static):
            inputs.insert(i, Var(identifier(names[i]), (), float))
        results = iter(graph.outputs)
        outputs = tuple(next(results) if c is _DYNAMIC else c for c in constants)
        return Traced(Graph(tuple(inputs), graph.eqns, outputs), tuple(self.captured), static), self._guarded(arguments)

    # ---- what the modes ask

    @property
    def is_current(self) -> bool:
        """Whether this is the innermost trace under way."""
        return CURRENT.get() is self

    @property
    def graph(self) -> torch.fx.Graph:
        """The nodes recorded so far."""
        graph: torch.fx.Graph = self._tracer.graph
        return graph

    def bring(self, value: Any) -> Any:
        """`value`, or the input that stands for it if it is a tensor or an Array from outside."""
        if isinstance(value, torch.Tensor) and id(value) not in self._given:
            return self.lift(value) if self._is_foreign(value) and not self._is_transformed(value) else value
        return self.lift(value) if isinstance(value, (torch.Tensor, Array)) else value

    def differentiates(self, value: torch.Tensor) -> None:
        """Note a tensor that a transform inside takes a gradient for."""
        self._differentiated[id(value)] = value

    @contextlib.contextmanager
    def substituting(self, given: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Inside, values from outside are replaced by others: `given` has them by id."""
        before, self._given = self._given, {**self._given, **given}
        try:
            yield
        finally:
            self._given = before

    def lift(self, value: Any) -> torch.Tensor:
        """What stands for `value`, a tensor or Array from outside: a new input, unless it is substituted."""
        from torch.fx.experimental.proxy_tensor import track_tensor_tree

        if id(value) in self._given:
            return self._given[id(value)]
        if id(value) not in self._lifted:
            number = len(self.captured)
            self.captured.append(value)
            with unseen():
                fake = self._example(aval_of(value), "")
                self._own(fake, "a tensor that it captures")
                mark(fake, states_of(value))
                with self.graph.inserting_after(self._last_input):
                    proxy = self._tracer.create_proxy("placeholder", f"captured_{number}", (), {})
                self._last_input = proxy.node
                track_tensor_tree(fake, proxy, constant=None, tracer=self._tracer)
            self._lifted[id(value)] = fake
            if (sharding := sharding_of(value)) is not None:
                self.placed[id(fake)] = sharding
        return self._lifted[id(value)]

    def emit(self, op: Any, operands: Sequence[Any], results: Sequence[Aval]) -> list[torch.Tensor]:
        """One node for `op`, a sub-program, and the tensors that stand for its results."""
        with unseen():
            fakes = [self._example(a, "") for a in results]
            record_call(self._tracer, op, operands, fakes)
        annotate(self.graph, *self.lines.locate())
        return fakes

    def operation(self, op: Any, args: Sequence[Any], shape: tuple[int, ...]) -> torch.Tensor:
        """One node for an operation whose operand is the first argument, and what stands for its result, of the same
        dtype. Nobody is asked: torch takes three times as long over an operation that it does not know."""
        from torch._subclasses.fake_tensor import FakeTensor

        like = args[0]
        with torch._C._DisableTorchDispatch():
            seen = torch.empty(shape, dtype=like.dtype, device="meta")
            fake = FakeTensor(self.mode, seen, like.fake_device)
        record_operation(self._tracer, op, args, fake, seen)
        return fake

    def owner(self, tensor: torch.Tensor) -> str | None:
        """What the storage of a tensor belongs to, if the step must not write it."""
        return self._owners.get(tensor.untyped_storage()._cdata)

    # ---- set-up and errors

    def _example(self, aval: Aval | float, name: str) -> Any:
        """The value that stands for an input of the step."""
        if isinstance(aval, torch.SymFloat):
            return aval
        if isinstance(aval, float):
            return _sym_float(self.mode, aval, name)
        with self.mode:
            return torch.empty(aval.shape, dtype=aval.dtype, device=aval.device)

    def _own(self, value: Any, what: str) -> None:
        """The step must not write to the storage of `value`."""
        if isinstance(value, torch.Tensor):
            self._owners[value.untyped_storage()._cdata] = what

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        return getattr(wrappers(tensor)[-1], "fake_mode", None) is not self.mode

    def _is_transformed(self, tensor: torch.Tensor) -> bool:
        """Whether a transform inside this trace has wrapped a tensor. Gradients are tied to the wrapper, so it must
        not be replaced; what it wraps comes by in its turn. Wrappers from outside look alike: one is from inside if
        there are more than the transforms outside make, or if it is being differentiated here."""
        *around, base = wrappers(tensor)
        here = [id(t) in self._differentiated for t in around]
        if any(here) and self.depth and not here[-1] and self._is_foreign(base):
            raise TraceError(errors.gradient_across(self.fn_name, self.lines.locate()[0]))
        return len(around) > self.depth or any(here)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self._tracer = proxy_mode.tracer
        self._last_input = self.graph._root.prev
        try:
            with Lift(self), Record(self):
                yield
        except TraceError:
            raise
        except Exception as e:
            source = source_of_traceback(e.__traceback__)
            if "wrapped->level() < level" in str(e):  # torch's assertion that transforms nest
                raise TraceError(errors.gradient_across(self.fn_name, source)) from e
            e.add_note(errors.during(self.fn_name, source))
            raise

    def _guarded(self, arguments: Sequence[Any]) -> frozenset[int]:
        """Float arguments on whose value the trace took a decision."""
        symbols = {v.node._expr: i for i, v in enumerate(arguments) if isinstance(v, torch.SymFloat)}
        env = self.mode.shape_env
        assert env is not None
        return frozenset(symbols[s] for g in env.guards for s in g.expr.free_symbols if s in symbols)


_DYNAMIC = object()  # marks an output that the graph computes


def _is_dynamic(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, torch.SymFloat, torch.SymInt, torch.SymBool))


def _fake_mode(parent: FakeTensorMode | None) -> FakeTensorMode:
    """A mode of its own, so that tensors from outside are told apart, with the numbers of the parent."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = parent.shape_env if parent else ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True, shape_env=env, static_shapes=True)


def _sym_float(mode: FakeTensorMode, value: float, name: str) -> torch.SymFloat:
    """A number without assumptions: comparing it with 0 is a decision too (positive=None)."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env, source = mode.shape_env, ConstantSource(name)
    assert env is not None
    symbol = env.create_symbol(
        value, source, DimDynamic.DYNAMIC, constraint_dim=None, positive=None, do_not_specialize_zero_one=True
    )
    return env.create_symfloatnode(symbol, hint=value, source=source)  # type: ignore[return-value]


@contextlib.contextmanager
def compiling_flag() -> Iterator[None]:
    """torch.compiler.is_compiling() is true inside: models leave out checks that read values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
