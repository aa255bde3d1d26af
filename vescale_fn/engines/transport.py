"""Collectives between processes, on top of four that torch.distributed has everywhere.

`Wire` moves flat buffers between the processes of one group. `Team` runs a program's collectives on it for the ranks
that sit in those processes, one or several each: it cuts and joins with the kernels that the virtual engine runs, so
both give the same bits wherever the order of a sum is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_fn.engines.kernels import Group, cut, join, reduce
from vescale_fn.engines.rows import check_arrival, land, traffic
from vescale_fn.sharding.comm import AllGather, AllReduce, Broadcast, Collective, RaggedAllToAll

# What gloo and NCCL both carry; anything else travels as bytes.
CARRIED = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
CARRIED |= {torch.int64, torch.int32, torch.int8, torch.uint8}
# The name since torch 2.13, or the one before.
all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
SMALL = 1 << 14  # elements below which one gather beats a scatter followed by a gather


Results = Callable[[], list[list[Tensor]]]  # waits; [local member][operand]


@dataclass(frozen=True, eq=False)
class Wire:
    """Flat buffers between the processes of one group. `group` is None when this process is alone. Each method starts
    a transfer and returns a function that waits for it and returns what arrived.

    wait: waits for the work of an asynchronous collective.
    """

    size: int = 1
    me: int = 0
    group: Any = None
    wait: Callable[[Any], Any] = lambda work: work.wait()

    def swap(self, parts: Sequence[Sequence[Tensor]], lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """parts[p] go to process p, one after the other; `lengths` are those of what comes back, one buffer from each
        process."""
        if self.group is None:
            return lambda: [_flat(row) for row in parts]
        dtype = parts[0][0].dtype
        unit = _unit(dtype)
        send = _carried(_flat([x for row in parts for x in row]))
        out = send.new_empty(sum(lengths) * unit)
        coming, going = [n * unit for n in lengths], [sum(x.numel() for x in row) * unit for row in parts]
        work = dist.all_to_all_single(out, send, coming, going, self.group, True)

        def finish() -> list[Tensor]:
            self.wait(work)
            return list(torch.split(out.view(dtype), list(lengths)))

        return finish

    def gather(self, mine: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        """The buffers of all processes, one after the other; `lengths` says how long each is."""
        if self.group is None:
            return lambda: mine
        longest = max(lengths)
        if mine.numel() < longest:
            mine = torch.cat([mine, mine.new_empty(longest - mine.numel())])
        send = _carried(mine)
        out = send.new_empty(self.size * send.numel())
        work, dtype = all_gather(out, send, self.group, True), mine.dtype

        def finish() -> Tensor:
            self.wait(work)
            got = out.view(dtype)
            if min(lengths) == longest:
                return got
            return torch.cat([p[:n] for p, n in zip(torch.split(got, [longest] * self.size), lengths)])

        return finish

    def spread(self, mine: Tensor, source: int) -> Callable[[], Tensor]:
        """The buffer of one process; of the others only the length and dtype of theirs matter."""
        if self.group is None:
            return lambda: mine
        buffer = _carried(mine if self.me == source else torch.empty_like(mine))
        work, dtype = dist.broadcast(buffer, group=self.group, async_op=True, group_src=source), mine.dtype

        def finish() -> Tensor:
            self.wait(work)
            return buffer.view(dtype)

        return finish

    def add(self, x: Tensor) -> Callable[[], None]:
        """x becomes the sum over all processes, in an order that the library chooses."""
        work = dist.all_reduce(x, dist.ReduceOp.SUM, self.group, True)
        return lambda: self.wait(work)


def _carried(flat: Tensor) -> Tensor:
    return flat if flat.dtype in CARRIED else flat.view(torch.uint8)


def _unit(dtype: torch.dtype) -> int:
    """Elements on the wire for one element."""
    return 1 if dtype in CARRIED else dtype.itemsize


@dataclass(frozen=True, eq=False)
class Team:
    """The members of one group of ranks, on the processes of a wire.

    owners: the process of each member, as its position in the wire. ordered: sums are taken in the order of the
    members, which gives the same bits for any number of processes.
    """

    wire: Wire
    owners: tuple[int, ...]
    ordered: bool = False

    @property
    def size(self) -> int:
        return len(self.owners)

    @property
    def mine(self) -> list[int]:
        """The members in this process."""
        return self.on(self.wire.me)

    def on(self, process: int) -> list[int]:
        return [m for m, owner in enumerate(self.owners) if owner == process]

    def start(
        self,
        comm: Collective,
        groups: Sequence[Group],
        shapes: Sequence[Any],
        operands: Sequence[Sequence[Tensor]],
        overwritable: Sequence[bool],
    ) -> Results:
        """Begin a collective on operands [local member][operand]; call what is returned for its results, in the same
        order. `groups` and `shapes` describe each operand, see `routes`. Operands of one dtype travel together."""
        operands = [[x.resolve_conj().resolve_neg() for x in row] for row in operands]  # the wire sees memory only
        if isinstance(comm, RaggedAllToAll):
            return self.ragged(operands)
        started: list[tuple[list[int], Results]] = []
        for same in _by_dtype(operands[0]):
            xs = [[row[k] for k in same] for row in operands]
            if isinstance(comm, AllReduce):
                finish = self.all_reduce(comm, xs, all(overwritable[k] for k in same))
            elif isinstance(comm, AllGather):
                finish = self.all_gather(comm, [groups[k] for k in same], [shapes[k] for k in same], xs)
            elif isinstance(comm, Broadcast):
                finish = self.broadcast(comm, xs)
            else:
                finish = self.exchange(comm, [groups[k] for k in same], [shapes[k] for k in same], xs)
            started.append((same, finish))
        return lambda: _in_slots([(same, finish()) for same, finish in started], len(groups))

    def all_reduce(self, comm: AllReduce, xs: Sequence[Sequence[Tensor]], overwrite: bool) -> Results:
        first = xs[0]
        shapes = [x.shape for x in first]
        if len(first) == 1 and self.native(comm, first[0]):
            out = first[0] if overwrite and first[0].is_contiguous() else _copy(first[0])
            return _after(self.wire.add(out), [[out]])
        flats = [_flat(row) for row in xs]
        if self.native(comm, flats[0]):
            return _after(self.wire.add(flats[0]), [_unflatten(flats[0], shapes)])
        total = self.total(comm, flats)

        def finish() -> list[list[Tensor]]:
            flat = total()
            return [_unflatten(flat if i == 0 else flat.clone(), shapes) for i in range(len(xs))]

        return finish

    def native(self, comm: AllReduce, x: Tensor) -> bool:
        """Whether the library's own sum does. Its max and min may lose NaN."""
        exact = self.ordered and self.size > 2
        alone = self.wire.group is not None and self.size == self.wire.size
        return alone and not exact and comm.kind == "sum" and x.dtype in CARRIED

    def total(self, comm: AllReduce, flats: Sequence[Tensor]) -> Callable[[], Tensor]:
        """All members' flat buffers combined in order: each process combines one stretch, then all are gathered."""
        wire, numel = self.wire, flats[0].numel()
        if wire.group is None or numel < SMALL:
            got = wire.gather(_flat(flats), [numel * len(self.on(p)) for p in range(wire.size)])
            return lambda: reduce(self.in_order(got(), [numel] * self.size), comm.kind)
        step = -(-numel // wire.size)
        lengths = [max(0, min(step, numel - p * step)) for p in range(wire.size)]
        stretches = [torch.split(flat, lengths) for flat in flats]
        mine = lengths[wire.me]
        swapped = wire.swap(
            [[s[p] for s in stretches] for p in range(wire.size)],
            [mine * len(self.on(p)) for p in range(wire.size)],
        )

        def finish() -> Tensor:
            stretch = reduce(self.in_order(_flat(swapped()), [mine] * self.size), comm.kind)
            return wire.gather(stretch, lengths)()

        return finish

    def in_order(self, flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """What came from each member, when a buffer holds it process by process."""
        arrival = [m for p in range(self.wire.size) for m in self.on(p)]
        pieces = dict(zip(arrival, torch.split(flat, [numels[m] for m in arrival])))
        return [pieces[m] for m in range(self.size)]

    def all_gather(
        self, comm: AllGather, groups: Sequence[Group], shapes: Sequence[Any], xs: Sequence[Sequence[Tensor]]
    ) -> Results:
        flat = _flat([x for row in xs for x in row])
        numels = [sum(math.prod(s[m]) for s in shapes) for m in range(self.size)]
        got = self.wire.gather(flat, [sum(numels[m] for m in self.on(p)) for p in range(self.wire.size)])
        if len(groups) == len(xs) == 1 and self.is_stacked(comm, shapes[0]):
            return lambda: [[got().view(-1, *shapes[0][0][1:])]]

        def finish() -> list[list[Tensor]]:
            rows = enumerate(self.in_order(got(), numels))
            pieces = [_unflatten(x, [s[m] for s in shapes]) for m, x in rows]
            return [[join(comm, g, [p[k] for p in pieces], m) for k, g in enumerate(groups)] for m in self.mine]

        return finish

    def is_stacked(self, comm: AllGather, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether pieces that lie one after the other in memory are the gathered tensor."""
        in_order = self.wire.group is not None and self.owners == tuple(sorted(self.owners))
        plain = comm.pre == 1 and comm.dim == 0 and not comm.flat
        return in_order and plain and math.prod(shapes[0][1:]) > 0

    def broadcast(self, comm: Broadcast, xs: Sequence[Sequence[Tensor]]) -> Results:
        owner, mine, shapes = self.owners[comm.source], self.mine, [x.shape for x in xs[0]]
        held = mine.index(comm.source) if owner == self.wire.me else 0
        got = self.wire.spread(_flat(xs[held]), owner)

        def finish() -> list[list[Tensor]]:
            flat, fresh = got(), owner != self.wire.me
            return [_unflatten(flat if fresh and i == 0 else flat.clone(), shapes) for i in range(len(mine))]

        return finish

    def exchange(
        self, comm: Collective, groups: Sequence[Group], shapes: Sequence[Any], xs: Sequence[Sequence[Tensor]]
    ) -> Results:
        """Every member sends a piece to every member; see `kernels.cut` and `kernels.join`."""
        mine, everyone = self.mine, range(self.size)
        cuts = [[cut(comm, g, x, m) for g, x in zip(groups, row)] for m, row in zip(mine, xs)]
        coming = {(m, to): [s[m][to] for s in shapes] for m in everyone for to in mine}
        got = self.trade(cuts, coming)

        def finish() -> list[list[Tensor]]:
            arrived = got()
            return [
                [join(comm, g, [arrived[m, to][k] for m in everyone], to) for k, g in enumerate(groups)] for to in mine
            ]

        return finish

    def ragged(self, operands: Sequence[Sequence[Tensor]]) -> Results:
        """Who sends how many rows where is swapped first, and checked by who receives them; then the rows."""
        mine, everyone = self.mine, range(self.size)
        said = [traffic(row, m, self.size) for m, row in zip(mine, operands)]
        news = self.trade(
            [[s.told(row[0].device)] for s, row in zip(said, operands)],
            {(m, to): [(2,)] for m in everyone for to in mine},
        )()
        told = {pair: tuple(x.tolist()) for pair, (x,) in news.items()}
        for s, row in zip(said, operands):
            check_arrival(row[1], s, [told[m, s.member] for m in everyone])
        got = self.trade(
            [[s.sent(row[0])] for s, row in zip(said, operands)],
            {pair: [(size, *operands[0][0].shape[1:])] for pair, (size, _) in told.items()},
        )
        outs = [_copy(row[1]) for row in operands]

        def finish() -> list[list[Tensor]]:
            arrived = got()
            return [
                [land(out, [told[m, to] for m in everyone], [arrived[m, to][0] for m in everyone])]
                for to, out in zip(mine, outs)
            ]

        return finish

    def trade(
        self, pieces: Sequence[Sequence[Sequence[Tensor]]], coming: Mapping[tuple[int, int], Sequence[Sequence[int]]]
    ) -> Callable[[], dict[tuple[int, int], list[Tensor]]]:
        """Every member sends pieces [local member][operand][to] to every member. What arrives, by sender and receiver;
        `coming` are its shapes."""
        mine, processes = self.mine, range(self.wire.size)
        sent = [[c[to] for row in pieces for to in self.on(p) for c in row] for p in processes]
        order = [[(m, to) for m in self.on(p) for to in mine] for p in processes]
        numels = [[sum(map(math.prod, coming[pair])) for pair in pairs] for pairs in order]
        got = self.wire.swap(sent, [sum(n) for n in numels])
        return lambda: {
            pair: _unflatten(x, coming[pair])
            for buffer, pairs, n in zip(got(), order, numels)
            for pair, x in zip(pairs, torch.split(buffer, n))
        }


def _after(work: Callable[[], None], results: list[list[Tensor]]) -> Results:
    """The results, once the work is done."""

    def finish() -> list[list[Tensor]]:
        work()
        return results

    return finish


def _in_slots(parts: Sequence[tuple[list[int], list[list[Tensor]]]], n: int) -> list[list[Tensor]]:
    """Results [member][operand] from those of some operands each."""
    rows: list[dict[int, Tensor]] = [{} for _ in parts[0][1]]
    for slots, results in parts:
        for row, xs in zip(rows, results):
            row.update(zip(slots, xs))
    return [[row[k] for k in range(n)] for row in rows]


def _by_dtype(xs: Sequence[Tensor]) -> list[list[int]]:
    """Positions of the tensors of each dtype."""
    found: dict[torch.dtype, list[int]] = {}
    for k, x in enumerate(xs):
        found.setdefault(x.dtype, []).append(k)
    return list(found.values())


def _flat(xs: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other in one flat buffer; one alone is not copied if it need not be."""
    return xs[0].reshape(-1) if len(xs) == 1 else torch.cat([x.reshape(-1) for x in xs])


def _unflatten(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of the given shapes that lie one after the other in a flat buffer."""
    return [x.view(list(s)) for x, s in zip(torch.split(flat, [math.prod(s) for s in shapes]), shapes)]


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
