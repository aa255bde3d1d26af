"""The ranks that one process holds, run in lock step: each up to its next collective, then the collective for all.

The ranks of a pipeline run different programs: there each goes on as soon as what it waits for can be, a collective
when its group is there, a receive when the message has been sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from vescale_fn.codegen import Code
from vescale_fn.nonfinite import FirstFound
from vescale_fn.sharding.mesh import rank_text
from vescale_fn.site import Link, Receive, Send, Site, Start, Wait

Request = tuple[Site | Start | Wait | Send | Receive, Sequence[Any]]
Operands = Mapping[int, Sequence[Any]]  # by rank
Answers = dict[int, list[Any]]


@dataclass(frozen=True, eq=False)
class LockStep:
    """A program bound to `ranks`, with the constants of each."""

    code: Code
    ranks: Sequence[int]
    constants: Sequence[tuple[Any, ...]]

    @abstractmethod
    def exchange(self, site: Site, operands: Operands) -> Answers:
        """Results by rank of one collective, for operands by rank; ranks are counted among those of this process. Those
        given are whole groups, as far as this process has them."""

    def start(self, site: Site, operands: Operands) -> dict[int, Any]:
        """Begin a collective. Something for each rank that `finish` takes."""
        return self.exchange(site, operands)

    def finish(self, site: Site, pending: Mapping[int, Any]) -> Answers:
        """The results of a collective that `start` began."""
        return dict(pending)

    def mail(self) -> Mail:
        """What carries messages in one run."""
        return Mail(self)

    def answer(self, what: Site | Start | Wait, operands: Operands) -> Answers:
        """What each rank gets for its request. Errors name the collective and the user's line."""
        try:
            if isinstance(what, Start):
                return {i: [handle] for i, handle in self.start(what.site, operands).items()}
            if isinstance(what, Wait):
                return self.finish(what.site, {i: handle for i, (handle,) in operands.items()})
            return self.exchange(what, operands)
        except Exception as error:
            error.add_note(f"in {what if isinstance(what, Site) else what.site}")
            raise

    def __call__(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Results [rank][leaf] for inputs [rank][leaf]; empties the inner lists. Gradients and the casts of autocast
        are part of the program, so the caller's contexts are switched off."""
        with torch.no_grad(), torch._C._DisableAutocast():
            return self.run(inputs)

    def run(self, inputs: list[list[Any]]) -> list[list[Any]]:
        """Run all ranks to the end."""
        watch, runs = FirstFound(), []
        for i, (args, k) in enumerate(zip(inputs, self.constants)):
            with watch:
                runs.append(self.on_rank(i, self.code.function, args, k))
        watch.raise_first()
        if not self.code.communicates:
            return runs
        results: dict[int, list[Any]] = {}
        waiting: dict[int, Request] = {}
        answers: dict[int, Iterator[Any] | None] = dict.fromkeys(range(len(runs)))
        with self.mail() as mail:
            while True:
                for i in sorted(answers):
                    try:
                        with watch:
                            waiting[i] = self.on_rank(i, runs[i].send, answers.pop(i))
                    except StopIteration as stop:
                        results[i] = stop.value
                watch.raise_first()
                if not waiting:
                    return [results[i] for i in range(len(runs))]
                # An iterator lets go of its list once unpacked: an answer lives no longer than the generated code
                # keeps it.
                found = self.answers(waiting, bool(results), mail)
                answers = {i: iter(xs) for i, xs in found.items()}
                del found

    def answers(self, waiting: dict[int, Request], ended: bool, mail: Mail) -> Answers:
        """What some ranks get, or all; these no longer wait. ended: whether some have come to their end."""
        what = waiting[min(waiting)][0]
        if isinstance(what, (Site, Start, Wait)) and not ended and all(w is what for w, _ in waiting.values()):
            operands = {i: xs for i, (_, xs) in waiting.items()}
            waiting.clear()
            return self.answer(what, operands)
        found = mail.deliver(waiting)
        for what, ranks in [] if found else self.groups_there(waiting):
            found |= self.answer(what, {i: waiting.pop(i)[1] for i in ranks})
        if not found and not mail.wait(waiting, found):
            raise stuck(self, waiting, ended)
        return found

    def groups_there(self, waiting: Mapping[int, Request]) -> list[tuple[Site | Start | Wait, list[int]]]:
        """Collectives that can run: every rank of a group that this process holds waits for it."""
        if not self.code.plans:  # all ranks run one program
            return []
        here = {r: i for i, r in enumerate(self.ranks)}
        found: list[tuple[Site | Start | Wait, list[int]]] = []
        asked = {id(w): w for w, _ in waiting.values() if isinstance(w, (Site, Start, Wait))}
        for what in asked.values():
            site = what if isinstance(what, Site) else what.site
            ready: list[int] = []
            for group in site.mesh.groups(site.comm.axes):
                members = [here[r] for r in group if r in here]
                if members and all(i in waiting and waiting[i][0] is what for i in members):
                    ready += members
            if ready:
                found.append((what, ready))
        return found

    def on_rank(self, i: int, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args) for the i-th rank of this process, which any error then names."""
        try:
            return fn(*args)
        except Exception as error:
            if not isinstance(error, StopIteration):
                error.add_note(f"on {self.name(i)} of mesh {self.code.program.mesh}")
            raise

    def name(self, i: int) -> str:
        """What the i-th rank of this process is called."""
        return rank_text(self.ranks[i], self.code.program.mesh.coords(self.ranks[i]))


class Mail:
    """Messages between the ranks of a process: a send returns at once, and those between two ranks arrive in order."""

    def __init__(self, run: LockStep) -> None:
        self.run = run
        self.sent: dict[tuple[int, int], deque[tuple[Send, list[Tensor]]]] = {}  # by from and to

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.sent.clear()

    def deliver(self, waiting: dict[int, Request]) -> Answers:
        """Take what ranks send, and hand out what has been sent to them."""
        found: Answers = {}
        for i, (what, xs) in list(waiting.items()):
            if isinstance(what, Send):
                self.post(i, what, list(xs))
                del waiting[i]
                found[i] = []
        for i, (what, _) in list(waiting.items()):
            if isinstance(what, Receive) and (got := self.take(i, what)) is not None:
                del waiting[i]
                found[i] = got
        return found

    def wait(self, waiting: dict[int, Request], found: Answers) -> bool:
        """Wait for messages of other processes, if any can come, and hand one out. Whether one came."""
        return False

    def post(self, i: int, what: Send, tensors: list[Tensor]) -> None:
        here = self.run.ranks[i]
        self.put(here, peer(what.link, here), what, tensors)

    def put(self, source: int, target: int, what: Send, tensors: list[Tensor]) -> None:
        self.sent.setdefault((source, target), deque()).append((what, tensors))

    def take(self, i: int, what: Receive) -> list[Tensor] | None:
        """What the i-th rank receives, if it is there."""
        here = self.run.ranks[i]
        queue = self.sent.get((peer(what.link, here), here))
        if not queue:
            return None
        sent, tensors = queue.popleft()
        if (sent.link, sent.microbatch) != (what.link, what.microbatch):
            raise RuntimeError(f"{self.run.name(i)} runs {what}, but the next message for it is that of {sent}.")
        return tensors


def peer(link: Link, rank: int) -> int:
    """The rank at the other end of a link."""
    coords = link.mesh.coords(rank)
    here = coords[link.axis]
    return link.mesh.rank({**coords, link.axis: link.target if here == link.source else link.source})


def stuck(run: LockStep, waiting: Mapping[int, Request], ended: bool) -> RuntimeError:
    """The error of ranks that cannot go on."""
    asked = {i: what.site if isinstance(what, (Start, Wait)) else what for i, (what, _) in waiting.items()}
    if not run.code.plans:
        texts = sorted(set(map(str, asked.values()))) + ["the end of the step"] * ended
        return RuntimeError(
            f"Ranks do not agree on the next collective: {' | '.join(texts)}. All ranks of a mesh must run the same "
            "program; a Python number that differs between ranks must not decide how often a loop runs."
        )
    texts = [f"{run.name(i)} waits in {what}" for i, what in asked.items()]
    return RuntimeError(
        f"The pipeline cannot go on: {'; '.join(texts)}. Check its table with schedules.pipelines.check."
    )
