"""The promise: pjit(f) equals f."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from hypothesis import reject
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vescale_fn as vf
from programs.program import Program, paths
from vescale_fn import lowering
from vescale_fn.lowered import Lowered
from vescale_fn.mesh import Mesh

TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "bfloat16": 0.05}


def check(program: Program, seen: Any = None) -> None:
    """Raises AssertionError when pjit of the program's step gives another result than the step. `seen`: a function
    that is shown each lowered program. Programs whose numbers explode do not count, unless they are `wild`."""
    step, values = program.step(), program.values()
    mesh = vf.make_mesh(**program.mesh)
    jitted, first = _jitted(program, step, mesh), []
    for _ in range(2 if program.feed else 1):
        want = _plain(program, step, values)
        with _shown(seen):
            got = _call(program, jitted, [*first, *values[len(first) :]], mesh)
        _compare(program, step, values, got, want)
        if program.feed:
            fed = _first_leaf(program, got)
            values[0] = fed.full()
            first = [] if program.in_shardings else [fed]  # which an Array may not contradict


def called(program: Program, mesh: Mesh, **options: Any) -> Any:
    """What pjit of the program's step gives, if torch can run the step at all."""
    _plain(program, program.step(), program.values())
    return _call(program, _jitted(program, program.step(), mesh, **options), program.values(), mesh)


def _call(program: Program, jitted: Any, values: list[Any], mesh: Mesh) -> Any:
    given = [
        x if program.in_shardings or isinstance(x, vf.Array) else vf.device_put(x, spec, mesh)
        for x, spec in zip(values, program.specs)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jitted(*program.arguments(given))


def _first_leaf(program: Program, result: Any) -> Any:
    """y0 in the step's result."""
    return eval(f"result{dict(paths(program.tree(program.result)))['y0']}", {"result": result})


def _jitted(program: Program, step: Any, mesh: Mesh, **options: Any) -> Any:
    options |= {**program.options, "mesh": mesh, "donate_argnums": tuple(program.donate)}
    if program.in_shardings:
        options["in_shardings"] = program.arguments(program.specs)
    if any(program.outs):
        options["out_shardings"] = program.results(program.outs)
    return vf.pjit(step, **options)


def _plain(program: Program, step: Any, values: list[torch.Tensor]) -> Any:
    """What the step gives on one device; programs that torch itself cannot run, or that explode, do not count."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = step(*program.arguments(values))
    except (RuntimeError, NotImplementedError):
        reject()
    tame = (x.dtype is torch.bool or bool((x.abs() < 1e6).all()) for x in tree_leaves(want) if x is not None)
    if not program.wild and not all(tame):
        reject()
    return want


def _compare(program: Program, step: Any, values: list[torch.Tensor], got: Any, want: Any) -> None:
    differences = list(_differences(program, got, want))
    if differences and not _hangs_on_the_last_bit(program, step, values, want):
        raise AssertionError("\n".join([f"y{i}: {text}" for i, text in differences]))


def _differences(program: Program, got: Any, want: Any) -> Iterator[tuple[int, str]]:
    tolerance = TOLERANCE[program.dtype]
    pairs = zip(tree_leaves(got), tree_leaves(want), strict=True)
    for i, (a, b) in enumerate(p for p in pairs if p != (None, None)):
        x = a.full() if isinstance(a, vf.Array) else a
        try:
            scale = _scale(b)
            torch.testing.assert_close(x, b, rtol=tolerance, atol=tolerance * (0.01 + scale), equal_nan=True)
        except AssertionError as error:
            yield i, str(error)


def _scale(x: torch.Tensor) -> float:
    """The largest finite magnitude."""
    sizes = x.abs().double() if x.dtype is not torch.bool else torch.zeros(0)
    return float(sizes.nan_to_num(0, 0, 0).amax()) if sizes.numel() else 0.0


class _Jitter(TorchDispatchMode):
    """Changes the last bits of what every operation computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = any(r.alias_info is not None for r in func._schema.returns)
        if isinstance(out, torch.Tensor) and out.is_floating_point() and not aliases:
            return out * (1 + 2 * torch.finfo(out.dtype).eps * torch.rand_like(out))
        return out


def _hangs_on_the_last_bit(program: Program, step: Any, values: list[torch.Tensor], want: Any) -> bool:
    """Whether rounding alone changes the result as much: a tie that decides, a difference of what should be equal."""
    torch.manual_seed(0)
    for _ in range(3):
        with _Jitter():
            other = step(*program.arguments(values))
        if any(True for _ in _differences(program, other, want)):
            return True
    return False


@contextmanager
def _shown(seen: Any) -> Iterator[None]:
    """While open, `seen` is called with what pjit lowers."""
    lower = lowering.lower

    def showing(*args: Any, **kwargs: Any) -> Lowered:
        lowered = lower(*args, **kwargs)
        seen(lowered)
        return lowered

    if seen is None:
        yield
    else:
        with mock.patch.object(lowering, "lower", showing):
            yield
