"""A program ready to run, and the way from the leaves of a call to its inputs and from its outputs to the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vescale_fn import errors
from vescale_fn.array import Array, ArrayType
from vescale_fn.engines import Executable
from vescale_fn.placement import cut
from vescale_fn.sharding.graph import Var
from vescale_fn.sharding.layout import Layout
from vescale_fn.sharding.mesh import Mesh
from vescale_fn.tracing import ShapeDtype
from vescale_fn.tree import unflatten

if TYPE_CHECKING:
    from vescale_fn.lowered import Lowered


@dataclass(frozen=True, eq=False)
class CallForm:
    """How the leaves of a call and of its result map to a program.

    dynamic: the leaves that are inputs of the program, in order; `paths` says what they are called.
    donated: positions among `dynamic` whose Arrays are dead after the call.
    """

    dynamic: tuple[int, ...]
    paths: tuple[str, ...]
    donated: frozenset[int]
    out_treedef: Any


@dataclass(frozen=True, eq=False)
class Loaded:
    """A program ready to run. `run` is None on an abstract mesh, where a call gives Arrays without values."""

    name: str
    run: Executable | None
    mesh: Mesh
    form: CallForm
    reuses: bool  # the program may write into donated storage
    captured: tuple[Any, ...]
    layouts: tuple[Layout | None, ...]  # of the program's inputs
    out_types: tuple[ArrayType | None, ...]  # None where a result is no tensor
    out_constants: tuple[Any, ...]
    continues: tuple[int | None, ...]  # per output the input whose layout, and names of dims, it keeps

    @staticmethod
    def of(lowered: Lowered, form: CallForm, run: Executable | None) -> Loaded:
        program, mesh = lowered.program, lowered.request.mesh
        graph, layouts = program.graph, program.layouts
        types = [
            ArrayType(layouts[v], v.dtype, mesh) if isinstance(v, Var) and v.is_tensor else None for v in graph.outputs
        ]
        ins = [layouts.get(v) for v in graph.inputs]
        kept = lowered.request.continues
        return Loaded(
            lowered.name,
            run,
            mesh,
            form,
            bool(program.donated),
            lowered.traced.captured,
            tuple(ins),
            tuple(types),
            tuple(None if isinstance(v, Var) else v for v in graph.outputs),
            tuple(kept[o] if t and o in kept and ins[kept[o]] == t.layout else None for o, t in enumerate(types)),
        )

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values = [leaves[i] for i in self.form.dynamic]
        names = [x.spec if isinstance(x, Array) else None for x in values]
        self._check_alive(values)
        outs = self._run(values) if self.run is not None else []
        results: list[Any] = list(self.out_constants)
        columns = [list(column) for column in zip(*outs)] or [[] for _ in results]
        for k, (column, t, source) in enumerate(zip(columns, self.out_types, self.continues, strict=True)):
            if t is not None:
                results[k] = Array(t, column, None if source is None else names[source])
            elif results[k] is None and column:  # a number that the program computes
                results[k] = column[0]
        return unflatten(self.form.out_treedef, results)

    def _run(self, values: list[Any]) -> list[list[Any]]:
        """Results [rank][leaf]. Donated Arrays are dead afterwards."""
        assert self.run is not None
        donated = {k: values[k] for k in self.form.donated if isinstance(values[k], Array)}
        gone = f"donated to {self.name}"
        columns = [
            x.take(gone) if self.reuses and k in donated else self._parts(x, k)
            for k, x in enumerate([*values, *self.captured])
        ]
        rows = [list(row) for row in zip(*columns)] if columns else [[] for _ in self.mesh.local_ranks]
        columns.clear()  # donated storage is the program's own from here on
        try:
            outs = self.run(rows)
        except Exception as error:
            if self.reuses and donated:
                for x in donated.values():
                    x.lost(f"{gone}, which raised {type(error).__name__}")
                error.add_note(errors.lost_arguments(self.name, [self.form.paths[k] for k in donated]))
            raise
        if not self.reuses:
            for x in donated.values():
                x.take(gone)
        return outs

    def _parts(self, value: Any, k: int) -> list[Any]:
        """What each rank of this process gets for program input k."""
        if isinstance(value, Array):
            return value.shards
        if isinstance(value, torch.Tensor):
            layout = self.layouts[k]
            assert layout is not None
            coords = self.mesh.shape.coords
            return [cut(value.to(self.mesh.device_of(r)), layout, coords(r)) for r in self.mesh.local_ranks]
        if isinstance(value, ShapeDtype):
            raise TypeError(errors.described_argument(self.name, self._path(k)))
        return [value] * len(self.mesh.local_ranks)

    def _check_alive(self, values: Sequence[Any]) -> None:
        """Raise before anything is taken when an Array is dead, or given twice and donated once."""
        seen: dict[int, int] = {}
        for k, x in enumerate([*values, *self.captured]):
            if not isinstance(x, Array):
                continue
            if x.is_deleted:
                raise RuntimeError(errors.donated_again(self.name, self._path(k), x.type.text(x.spec), x.gone))
            first = seen.setdefault(id(x), k)
            if first != k and (first in self.form.donated or k in self.form.donated):
                raise ValueError(errors.donated_twice(self.name, self._path(first), self._path(k)))

    def _path(self, k: int) -> str:
        return f"argument {self.form.paths[k]}" if k < len(self.form.paths) else "a captured value"
