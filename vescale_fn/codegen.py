"""Python source for a per-rank program: one text for every rank and every engine.

The text is a generator function `step(args, k)`. It takes its inputs out of the list `args`, calls each local
operation directly, drops every value after its last use, and hands each collective to whoever drives it:

    y, = yield all_reduce_3, (x,)

or, where there is work to do before the result is needed,

    pending, = yield start_all_reduce_3, (x,)
    ...
    y, = yield wait_all_reduce_3, (pending,)

`k` holds what differs from rank to rank (uneven extents, coordinates, the device); what all ranks share stands in
the text. Sub-programs are functions of their own, entered with `yield from`; loops stay loops.
"""

from __future__ import annotations

import hashlib
import keyword
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import Any

import torch

from vescale_fn.actions import actions_of
from vescale_fn.engines.kernels import own_slice, to_partial
from vescale_fn.engines.pipeline import Plan, plan_of, run_row
from vescale_fn.fused import IN_PLACE
from vescale_fn.liveness import last_uses, overwritable, waits
from vescale_fn.names import Names, identifier
from vescale_fn.program import AxisIndex, LocalDim, Owned, Program, bind_constant
from vescale_fn.sharding.comm import COLLECTIVES, Slice, ToPartial, check_indices, comm_name
from vescale_fn.sharding.graph import Call, Eqn, Graph, Pipeline, Scan, Var, op_name, variables, vars_in
from vescale_fn.site import Constant, Cut, Device, Site, Start, Wait, bind_to_rank, same_everywhere

_WIDTH = 116  # of a line of the text
_COMMENT = 80  # where comments start
_OWN = ("torch", "args", "k")  # names that the text uses itself


@dataclass(frozen=True, eq=False)
class Code:
    """The generated function of a program, before it is bound to a rank.

    names: what the text refers to (operations, functions, sites). constants: what `k` holds on each rank.
    communicates: `step` is a generator; otherwise it returns its results directly.
    """

    program: Program
    source: str
    names: Mapping[str, Any]
    constants: tuple[Constant, ...]
    sites: tuple[Site, ...]
    communicates: bool
    plans: tuple[Plan, ...] = ()  # of pipelines

    def bind(self, coords: Mapping[str, int], device: torch.device | str = "cpu") -> tuple[Any, ...]:
        """The constants of the rank at `coords`."""
        mesh, where = self.program.mesh, torch.device(device)
        return tuple(bind_to_rank(c, mesh, coords, where) for c in self.constants)

    @cached_property
    def function(self) -> Callable[[list[Any], tuple[Any, ...]], Any]:
        """`step(args, k)`. Tracebacks show the generated lines."""
        filename = f"<step {self.fingerprint[:12]}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        namespace = dict(self.names)
        exec(compile(self.source, filename, "exec"), namespace)
        step: Callable[[list[Any], tuple[Any, ...]], Any] = namespace["step"]
        return step

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that all ranks must agree on."""
        facts = [self.source, str(self.program.mesh), *map(str, self.constants)]
        facts += [f"{s.comm} {list(map(str, s.ins))} {list(s.dtypes)}" for s in self.sites]
        facts += [str([(kind, str(what), k) for kind, what, k in row.actions]) for p in self.plans for row in p.rows]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def generate(program: Program, reserved: Mapping[str, Any] | None = None) -> Code:
    """The code of a program, the same for all its ranks. `reserved`: names whose meaning is settled already."""
    module = _Module(program, dict(reserved or {}))
    communicates = _Function(module, program.graph, "step").emit()
    source = "\n\n\n".join(module.functions) + "\n"
    return Code(
        program, source, module.names, tuple(module.constants), tuple(module.sites), communicates, tuple(module.plans)
    )


def _word(name: str) -> str:
    """`name` as a name that the text may bind."""
    word = identifier(name)
    return f"v_{word}" if keyword.iskeyword(word) or word in _OWN else word


@dataclass(eq=False)
class _Module:
    """The functions, global names and constants of one program's text, as they accumulate."""

    program: Program
    reserved: Mapping[str, Any]
    unique: Names = field(init=False)
    functions: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    constants: list[Constant] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    slots: dict[Constant, int] = field(default_factory=dict)
    known: dict[int, str] = field(default_factory=dict)  # id of an object -> its global name
    bodies: dict[int, tuple[str, bool]] = field(default_factory=dict)  # id of a Graph -> its function, communicates

    def __post_init__(self) -> None:
        self.names["torch"] = torch
        self.known |= {id(thing): name for name, thing in self.reserved.items()}
        values = {_word(v.name) for v in variables(self.program.graph)}
        self.unique = Names({*_OWN, "step", *self.reserved, *values})

    def fresh(self, name: str) -> str:
        """`name`, or `name_1`, ..., and nobody else's."""
        return self.unique.fresh(_word(name))

    def name_of(self, thing: Any) -> str:
        """The global name of an operation, function or object."""
        if id(thing) not in self.known:
            hint = op_name(thing) if isinstance(thing, torch._ops.OpOverload) else getattr(thing, "__name__", None)
            self.known[id(thing)] = self.fresh(hint or op_name(thing))
        self.names[self.known[id(thing)]] = thing
        return self.known[id(thing)]

    def constant(self, c: Constant) -> str:
        """How the text refers to what differs between ranks."""
        slot = self.slots.setdefault(c, len(self.constants))
        if slot == len(self.constants):
            self.constants.append(c)
        return f"k[{slot}]"

    def site(self, e: Eqn, may_overwrite: tuple[bool, ...]) -> Site:
        """A collective, known to the text by its name."""
        layouts = self.program.layouts
        check_indices(e.op, self.program.mesh.extent(e.op.axes))
        name = self.fresh(f"{comm_name(e.op)}_{len(self.sites)}")
        ins, outs = tuple(layouts[v] for v in e.operands), tuple(layouts[v] for v in e.outs)
        where = f"{e.source}: {e.source.code}" if e.source.file else ""
        dtypes = tuple(v.dtype for v in e.outs)
        self.names[name] = site = Site(len(self.sites), name, e.op, ins, outs, dtypes, may_overwrite, where)
        self.sites.append(site)
        return site

    def bind(self, name: str, thing: Any) -> str:
        """A global name of the text for something of its own."""
        name = self.fresh(name)
        self.names[name] = thing
        return name

    def body(self, graph: Graph, name: str) -> tuple[str, bool]:
        """The function of a sub-program's body, written on first use."""
        if id(graph) not in self.bodies:
            name = self.fresh(name)
            self.bodies[id(graph)] = name, _Function(self, graph, name).emit()
        return self.bodies[id(graph)]


@dataclass(eq=False)
class _Function:
    """The text of one graph."""

    module: _Module
    graph: Graph
    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)  # code, the user's line
    local: dict[Var, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    reuse: Mapping[Eqn, tuple[bool, ...]] = field(default_factory=dict)  # see `overwritable`
    ends: Mapping[Eqn, int] = field(default_factory=dict)  # see `waits`
    pending: dict[int, list[tuple[Eqn, Site, str, tuple[Var, ...]]]] = field(default_factory=dict)  # by where they end
    communicates: bool = False

    def emit(self) -> bool:
        """Write the function into the module. Returns whether it is a generator."""
        program = self.module.program
        owned = frozenset(program.graph.inputs[i] for i in program.donated) if self.name == "step" else frozenset()
        self.reuse, self.ends, dying = overwritable(self.graph, owned), waits(self.graph), last_uses(self.graph)
        if self.graph.inputs:
            self.line(f"{_targets(map(self.define, self.graph.inputs))} = args; args.clear()")
        self.drop(dying.get(-1, ()))
        phase = "forward"
        for i, e in enumerate(self.graph.eqns):
            if e.phase != phase:
                phase = e.phase
                self.line(f"# {phase}")
            self.finish(i)
            self.equation(e, dying.get(i, ()))
        self.finish(len(self.graph.eqns))
        self.line(f"return [{', '.join(map(self.text, self.graph.outputs))}]")
        self.module.functions.append("\n".join([f"def {self.name}(args, k):", *starmap(_layout, self.lines)]))
        return self.communicates

    def line(self, code: str, e: Eqn | None = None, indent: int = 4) -> None:
        self.lines.append((" " * indent + code, e.source.short if e else ""))

    def define(self, v: Var) -> str:
        """A local name of v. Two Vars of one name stay apart."""
        name = _word(v.name)
        taken = name in self.used or name in self.module.reserved
        self.local[v] = self.module.fresh(name) if taken else name
        self.used.add(self.local[v])
        return self.local[v]

    def drop(self, dying: Iterable[Var]) -> None:
        """Release values that nothing reads any more, on the line before."""
        names = [self.local[v] for v in dying]
        if names:
            code, comment = self.lines[-1]
            self.lines[-1] = f"{code}; del {_targets(names).removesuffix(',')}", comment

    def equation(self, e: Eqn, dying: tuple[Var, ...]) -> None:
        match e.op:
            case Pipeline():
                self.pipeline(e, dying)
            case Scan():
                self.scan(e, dying)
            case Call():
                self.call(e, dying)
            case _ if isinstance(e.op, COLLECTIVES):
                self.collective(e, dying)
            case _:
                call = self.local_comm(e) if isinstance(e.op, (Slice, ToPartial)) else self.call_text(e)
                names = [self.define(v) for v in e.outs]
                several = len(names) > 1 or _returns_list(e.op)
                self.line(f"{_targets(names) if several else names[0]} = {call}" if names else call, e)
                self.drop(dying)

    def collective(self, e: Eqn, dying: tuple[Var, ...]) -> None:
        """A collective, or its start when it ends later."""
        self.communicates = True
        operands = f"({', '.join(map(self.text, e.operands))},)"
        site = self.module.site(e, self.reuse[e])
        if e not in self.ends:
            self.line(f"{_targets(map(self.define, e.outs))} = yield {site.name}, {operands}", e)
            self.drop(dying)
            return
        pending = self.module.fresh(f"pending_{site.index}")
        start = self.module.bind(f"start_{site.name}", Start(site))
        self.line(f"{pending}, = yield {start}, {operands}", e)
        self.drop(v for v in dying if v not in e.outs)
        unread = tuple(v for v in dying if v in e.outs)
        self.pending.setdefault(self.ends[e], []).append((e, site, pending, unread))

    def finish(self, i: int) -> None:
        """Wait for the collectives that must end before equation i."""
        for e, site, pending, unread in self.pending.pop(i, ()):
            wait = self.module.bind(f"wait_{site.name}", Wait(site))
            self.line(f"{_targets(map(self.define, e.outs))} = yield {wait}, ({pending},); del {pending}", e)
            self.drop(unread)

    def call_text(self, e: Eqn) -> str:
        arguments = [self.text(a) for a in e.args] + [f"{n}={self.text(a)}" for n, a in e.kwargs.items()]
        return f"{self.module.name_of(e.op)}({', '.join(arguments)})"

    def local_comm(self, e: Eqn) -> str:
        """The collectives that need no communication."""
        (x,) = map(self.text, e.operands)
        if isinstance(e.op, Slice):
            if e.op.flat:
                x = f"{x}.flatten({e.op.dim}, {e.op.dim + len(e.op.flat) - 1})"
            cut = self.module.constant(Cut(e.op, self.module.program.layouts[e.outs[0]]))
            return f"{self.module.name_of(own_slice)}({x}, {e.op.dim}, {e.op.pre}, *{cut})"
        index = self.module.constant(AxisIndex(e.op.axes))
        return f"{self.module.name_of(to_partial)}({x}, {e.op.kind!r}, {index})"

    def call(self, e: Eqn, dying: tuple[Var, ...]) -> None:
        body, communicates = self.module.body(e.op.body, e.op.name)
        self.communicates |= communicates
        boxed = self.module.fresh(f"{body}_args")
        self.line(f"{boxed} = [{', '.join(map(self.text, e.args))}]", e)
        self.drop(v for v in dying if v not in e.outs)
        self.line(f"{_targets(map(self.define, e.outs))} = {_enter(communicates)}{body}({boxed}, k)", e)
        self.drop(v for v in dying if v in e.outs)

    def scan(self, e: Eqn, dying: tuple[Var, ...]) -> None:
        """A loop that keeps carries in a list and writes stacked results in place."""
        scan, fresh = e.op, self.module.fresh
        body, communicates = self.module.body(scan.body, "body")
        self.communicates |= communicates
        carry, boxed, i = fresh(f"{body}_carry"), fresh(f"{body}_args"), fresh("i")
        split = scan.num_consts + scan.num_carry
        consts, first = (list(map(self.text, a)) for a in (e.args[: scan.num_consts], e.args[scan.num_consts : split]))
        slices = [f"{self.text(x)}[{i}]" for x in e.args[split:]]
        read_inside = {*vars_in(e.args[: scan.num_consts]), *vars_in(e.args[split:])}
        self.line(f"{carry} = [{', '.join(first)}]", e)
        self.drop(v for v in dying if v not in e.outs and v not in read_inside)
        stacked = e.outs[scan.num_carry :]
        for v in stacked:
            self.line(f"{self.define(v)} = {self.empty(v)}")
        order = f"range({scan.length - 1}, -1, -1)" if scan.reverse else f"range({scan.length})"
        self.line(f"for {i} in {order}:")
        self.line(f"{boxed} = [{', '.join([*consts, f'*{carry}', *slices])}]; {carry}.clear()", indent=8)
        pieces = [fresh(f"{self.local[v]}_i") for v in stacked]
        self.line(f"{_targets([f'*{carry}', *pieces])} = {_enter(communicates)}{body}({boxed}, k)", indent=8)
        for v, piece in zip(stacked, pieces):
            self.line(f"{self.local[v]}[{i}].copy_({piece}); del {piece}", indent=8)
        finals = [self.define(v) for v in e.outs[: scan.num_carry]]
        self.line(f"{_targets(finals)} = {carry}; del {carry}" if finals else f"del {carry}")
        self.drop(v for v in dying if v in e.outs or v in read_inside)

    def pipeline(self, e: Eqn, dying: tuple[Var, ...]) -> None:
        """A loop whose pieces each rank runs in the order of its row: see `engines.pipeline`."""
        self.communicates = True
        fresh = self.module.fresh
        actions = actions_of(e.op)
        functions = [self.module.body(p.graph, p.name) for p in actions.pieces.values()]
        plan = plan_of(actions, [communicates for _, communicates in functions], self.module.program.layouts)
        name, boxed = self.module.bind(f"{identifier(e.op.name)}_rows", plan), fresh("pipeline_args")
        self.module.plans.append(plan)
        self.line(f"{boxed} = [{', '.join(map(self.text, e.args))}]", e)
        self.drop(v for v in dying if v not in e.outs)
        run, index = self.module.name_of(run_row), self.text(AxisIndex((e.op.axis,)))
        device = self.module.constant(Device())
        called = f"{run}({name}, {index}, {device}, {boxed}, k, ({', '.join(f for f, _ in functions)},))"
        self.line(f"{_targets(map(self.define, e.outs))} = yield from {called}")
        self.drop(v for v in dying if v in e.outs)

    def empty(self, v: Var) -> str:
        """Memory for the stacked results of a loop."""
        layout = self.module.program.layouts[v]
        shape = self.text(tuple(LocalDim(layout, d) for d in range(layout.ndim)))
        return f"torch.empty({shape}, dtype={v.dtype}, device={self.module.constant(Device())})"

    def text(self, a: Any) -> str:
        """An argument as Python source."""
        match a:
            case Var():
                return self.local[a]
            case LocalDim() | Owned() | AxisIndex():
                mesh = self.module.program.mesh
                origin = dict.fromkeys(mesh.names, 0)
                return repr(bind_constant(a, mesh, origin)) if same_everywhere(a, mesh) else self.module.constant(a)
            case torch.device():
                return self.module.constant(Device(a))
            case float():
                return repr(a) if a - a == 0 else f"float('{a}')"
            case None | bool() | int() | str() | complex() | torch.dtype() | torch.layout() | torch.memory_format():
                return repr(a)
            case list():
                return f"[{', '.join(map(self.text, a))}]"
            case tuple():
                return f"({', '.join(map(self.text, a))}{',' * (len(a) == 1)})"
            case dict():
                return f"{{{', '.join(f'{self.text(n)}: {self.text(x)}' for n, x in a.items())}}}"
            case slice():
                return f"slice({self.text(a.start)}, {self.text(a.stop)}, {self.text(a.step)})"
        return self.module.name_of(a)


def _targets(names: Iterable[str]) -> str:
    """Names to assign to; in brackets when they are many, so that the line may be broken."""
    text = ", ".join(names)
    if "," not in text:
        return f"{text}," if text else "[]"
    return f"({text})" if len(text) > _WIDTH // 2 else text


def _layout(code: str, comment: str) -> str:
    """A line of the text, broken where it is too long."""
    if len(code) > _WIDTH:
        indent = " " * (len(code) - len(code.lstrip()))
        code = "\n".join(_broken(code.replace("; del ", f"\n{indent}del ")))
    last = len(code) - code.rfind("\n") - 1
    return code + " " * max(0, _COMMENT - last) + f"  # {comment}" if comment else code


def _broken(code: str) -> Iterator[str]:
    """Lines no longer than the width, broken after commas in brackets and outside strings."""
    start = depth = 0
    stop, quote, indent = None, "", ""
    for i, c in enumerate(code):
        if c == "\n":
            yield indent + code[start:i]
            start, stop, indent = i + 1, None, ""
        elif quote:
            quote = "" if c == quote and code[i - 1] != "\\" else quote
        elif c in "'\"":
            quote = c
        depth += (c in "([{") - (c in ")]}") if not quote else 0
        if stop and len(indent) + i - start >= _WIDTH:
            yield indent + code[start:stop]
            start, stop, indent = stop + 1, None, " " * 8
        if code[i - 1 : i + 1] == ", " and depth and not quote:
            stop = i
    yield indent + code[start:]


def _enter(communicates: bool) -> str:
    return "yield from " if communicates else ""


def _returns_list(op: Any) -> bool:
    """Whether an operation returns a list even when it has one result."""
    if not isinstance(op, torch._ops.OpOverload):
        return op in IN_PLACE.values()
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)
