"""How many bytes a rank holds while a program runs.

Both counts run the very code that an engine runs, under a dispatch mode that sees every tensor being made and every
storage being freed: `peak_bytes` on fake tensors, which have shapes and no memory, for one rank; `measure_memory` on
real ones, for all virtual ranks. Scratch memory inside a kernel, and buffers inside a collective, are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fn.codegen import Code, generate
from vescale_fn.engines.lockstep import Answers, Operands
from vescale_fn.engines.virtual import VirtualExecutable
from vescale_fn.host import on_host
from vescale_fn.program import Program
from vescale_fn.sharding.graph import Var
from vescale_fn.site import Device, Receive, Send, Site, Start, Wait


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of one rank during one step. Donated arguments are freed at their last use, others stay.

    argument: all arguments. output: results that are not arguments. peak: the most that lives at once, arguments and
    results included. temp: the most that lives at once and is neither. host: the most that lives at once of arguments
    and results that the program keeps in host memory (`schedules.offload`), which the others leave out.
    """

    argument: int
    output: int
    temp: int
    peak: int
    host: int = 0

    def __str__(self) -> str:
        rows = [("arguments", self.argument), ("outputs", self.output), ("temporaries", self.temp), ("peak", self.peak)]
        rows += [("host", self.host)] if self.host else []
        return "\n".join(f"{name:<12} {n:>14,} B  {n / 2**20:>10.2f} MiB" for name, n in rows)


@dataclass(eq=False)
class Ledger:
    """Storages coming and going, in order: (id, bytes), negative when freed."""

    events: list[tuple[int, int]] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)  # address of a storage -> its id
    count: int = 0

    def note(self, x: Any) -> int | None:
        """Count the storage of x, if it is new. Its id."""
        if not isinstance(x, Tensor):
            return None
        storage = x.untyped_storage()
        address = storage._cdata
        if address not in self.live:
            self.count += 1
            self.live[address] = self.count
            self.events.append((self.count, storage.nbytes()))
            weakref.finalize(storage, self._freed, address, self.count, storage.nbytes())
        return self.live[address]

    def _freed(self, address: int, name: int, nbytes: int) -> None:
        self.events.append((name, -nbytes))
        self.live.pop(address, None)

    def peak(self, without: frozenset[int] = frozenset()) -> int:
        """The most bytes that lived at once, some storages left out."""
        most = now = 0
        for name, nbytes in self.events:
            if name not in without:
                now += nbytes
                most = max(most, now)
        return most

    @property
    def names(self) -> frozenset[int]:
        return frozenset(name for name, _ in self.events)

    def total(self, names: frozenset[int]) -> int:
        return sum(n for name, n in self.events if name in names and n > 0)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every tensor that an operation returns."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.ledger.note(x)
        return out


def peak_bytes(program: Program, coords: Mapping[str, int]) -> MemoryStats:
    """Bytes that the rank at `coords` holds, without running anything."""
    code, ledger = generate(program), Ledger()
    device = next((c.traced for c in code.constants if isinstance(c, Device) and c.traced), torch.device("cpu"))
    with FakeTensorMode(), device:
        inputs = [_empty(v, program, coords) for v in program.graph.inputs]
        arguments = _noted(ledger, inputs)
        host = _of_host(ledger, program, program.graph.inputs, inputs)
        kept = [x for i, x in enumerate(inputs) if i not in program.donated]
        with _Counting(ledger):
            results = _run_alone(code, inputs, code.bind(coords, device), coords)
        outputs = _noted(ledger, results) - arguments
        stats = _stats(ledger, arguments, outputs, host | _of_host(ledger, program, program.graph.outputs, results))
    del kept
    return stats


def _empty(v: Var, program: Program, coords: Mapping[str, int]) -> Any:
    """Something of the type of v on a rank; a number is 1."""
    return torch.empty(program.layouts[v].local_shape(coords), dtype=v.dtype) if v.is_tensor else v.dtype(1)


def _run_alone(code: Code, inputs: list[Any], k: tuple[Any, ...], coords: Mapping[str, int]) -> list[Any]:
    """One rank's code with collectives answered by empty tensors of the right shape."""
    run = code.function(inputs, k)
    answer = None
    while code.communicates:
        try:
            what, operands = run.send(answer)
        except StopIteration as stop:
            run = stop.value
            break
        if isinstance(what, Wait):
            answer = iter(operands[0])
        elif isinstance(what, (Send, Receive)):
            link = what.link if isinstance(what, Receive) else None
            outs = (
                [torch.empty(x.local_shape(coords), dtype=d) for x, d in zip(link.layouts, link.dtypes)] if link else []
            )
            answer = iter(outs)
            del outs
        else:
            site = what.site if isinstance(what, Start) else what
            outs = [torch.empty(x.local_shape(coords), dtype=d) for x, d in zip(site.outs, site.dtypes)]
            answer = iter([outs] if isinstance(what, Start) else outs)
            del outs
        del operands
    results: list[Any] = run
    return results


def measure_memory(program: Program, inputs: list[list[Any]]) -> list[MemoryStats]:
    """What each virtual rank held while the program ran on `inputs` [rank][leaf], counted as it allocated and freed.

    The lists are emptied; of arguments that are not donated a reference is kept until the end.
    """
    code, ranks = generate(program), range(program.mesh.size)
    constants = [code.bind(program.mesh.coords(r)) for r in ranks]
    run = _Measured(code, ranks, constants, [Ledger() for _ in ranks])
    arguments = [_noted(ledger, xs) for ledger, xs in zip(run.ledgers, inputs)]
    host = [_of_host(ledger, program, program.graph.inputs, xs) for ledger, xs in zip(run.ledgers, inputs)]
    kept = [[x for i, x in enumerate(xs) if i not in program.donated] for xs in inputs]
    results = run(inputs)
    outputs = [_noted(ledger, xs) - a for ledger, xs, a in zip(run.ledgers, results, arguments)]
    host = [
        a | _of_host(ledger, program, program.graph.outputs, xs) for ledger, xs, a in zip(run.ledgers, results, host)
    ]
    stats = [_stats(*of_rank) for of_rank in zip(run.ledgers, arguments, outputs, host)]
    del kept
    return stats


def _noted(ledger: Ledger, xs: Sequence[Any]) -> frozenset[int]:
    return frozenset(name for x in xs if (name := ledger.note(x)) is not None)


def _of_host(ledger: Ledger, program: Program, values: Sequence[Any], xs: Sequence[Any]) -> frozenset[int]:
    """Of the `values` of a program, which are `xs` on a rank, those in host memory."""
    host = on_host(program)
    return _noted(ledger, [x for x, v in zip(xs, values) if isinstance(v, Var) and v in host])


def _stats(ledger: Ledger, arguments: frozenset[int], outputs: frozenset[int], host: frozenset[int]) -> MemoryStats:
    return MemoryStats(
        argument=ledger.total(arguments - host),
        output=ledger.total(outputs - host),
        temp=ledger.peak(arguments | outputs | host),
        peak=ledger.peak(host),
        host=ledger.peak(ledger.names - host),
    )


@dataclass(frozen=True, eq=False)
class _Measured(VirtualExecutable):
    """Virtual ranks that count their allocations."""

    ledgers: Sequence[Ledger]

    def on_rank(self, i: int, fn: Callable[..., Any], *args: Any) -> Any:
        with _Counting(self.ledgers[i]):
            return super().on_rank(i, fn, *args)

    def exchange(self, site: Site, operands: Operands) -> Answers:
        results = super().exchange(site, operands)
        for i, xs in results.items():
            _noted(self.ledgers[i], xs)
        return results
