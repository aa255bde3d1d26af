"""`debug_print`: look at values while a step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from vescale_fn.array import Array
from vescale_fn.effects import DEBUG_PRINT, is_silent, show
from vescale_fn.sharding.mesh import rank_text
from vescale_fn.tracing import current_trace
from vescale_fn.tree import flatten, unflatten

_FORMATTER = Formatter()


def debug_print(fmt: str, *args: Any, per_rank: bool = False, **kwargs: Any) -> None:
    """Print `fmt.format(*args, **kwargs)` when a step gets here, with the values of tensors, each time that it does.

    Values are global, and printed once, by the process of rank 0; a value that is spread over ranks is gathered for it.
    per_rank: every rank prints the part that it holds, with its name in front, and nothing is sent. What is pending in
        a sum is printed as it is.
    In the body of a loop it prints in every iteration, under vmap for each element, under grad in forward only (once,
    with remat too). The lines of a rank come in the order of the program. Layouts do not depend on it.
    In a region of `shard_map` a value belongs to a rank along the axes of the region, and is printed for each of them.
    Arguments may be tensors, pytrees of them, and anything else that can be formatted.
    Raises ValueError when the format does not fit the arguments.

    >>> import vescale_fn as vf
    >>> x = vf.device_put(torch.arange(4.0), "d/dp", vf.make_mesh(dp=2))
    >>> @vf.pjit
    ... def total(x):
    ...     vf.debug_print("the sum of {} is {:.2f}", x, x.sum())
    ...     vf.debug_print("mine: {x}", x=x, per_rank=True)
    ...     return x.sum()
    >>> _ = total(x)
    the sum of tensor([0., 1., 2., 3.]) is 6.00
    rank 0 (dp=0): mine: tensor([0., 1.])
    rank 1 (dp=1): mine: tensor([2., 3.])
    """
    if is_silent():
        return
    template = _Template.of(fmt, args, kwargs)
    trace = current_trace()
    if trace is None and any(isinstance(x, Array) for x in template.values):
        _print_arrays(template, per_rank)
        return
    values = [_as_tensor(x) if trace is None else trace.bring(_as_tensor(x)) for x in template.values]
    DEBUG_PRINT(values or [torch.zeros(())], template.text, 0, per_rank)


def _as_tensor(x: Any) -> Any:
    """A number of the step, which varies from call to call, as a tensor."""
    return x if isinstance(x, (Tensor, Array)) else torch.full((), x, dtype=torch.float64)


def _print_arrays(template: _Template, per_rank: bool) -> None:
    """Outside of a step. Arrays are gathered, so every process must come here."""
    mesh = next(x.mesh for x in template.values if isinstance(x, Array))
    if per_rank:
        for i, rank in enumerate(mesh.local_ranks):
            parts = [x.shards[i] if isinstance(x, Array) else x for x in template.values]
            show(parts, template.text, 0, f"{rank_text(rank, mesh.shape.coords(rank))}: ")
        return
    whole = [x.full() if isinstance(x, Array) else x for x in template.values]
    if mesh.process == 0:
        show(whole, template.text, 0)


# ---- formats


@dataclass(eq=False)
class _Template:
    """A format whose fields that hold no tensor are filled in; the others refer to `values` by position."""

    text: str = ""
    values: list[Any] = field(default_factory=list)

    @staticmethod
    def of(fmt: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Template:
        template, position = _Template(), count()
        try:
            for literal, name, spec, conversion in _FORMATTER.parse(fmt):
                template.text += _escaped(literal)
                if name is None:
                    continue
                name = f"{next(position)}{name}" if name[:1] in ("", ".", "[") else name
                value = _FORMATTER.get_field(name, args, kwargs)[0]
                template.add(value, _FORMATTER.vformat(spec or "", args, kwargs), conversion)
        except (IndexError, KeyError, AttributeError, ValueError, TypeError) as e:
            given = f"{len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
            raise ValueError(
                f"vf.debug_print: the format {fmt!r} does not fit its {given}: {e}. Formats are those of str.format; "
                "a tensor with dims takes {} only, a 0-d tensor what its number takes, as in {:.3f}."
            ) from None
        return template

    def add(self, value: Any, spec: str, conversion: str | None) -> None:
        """One field."""
        if _varies(value):
            format(_example(value), spec)  # an error is raised here, not when the step runs
            self.text += self.reference(value, (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else ""))
            return
        leaves, treedef = flatten(value)
        if any(map(_varies, leaves)):
            value = unflatten(treedef, [_Mark(self, x) if _varies(x) else x for x in leaves])
        plain = _FORMATTER.format_field(_FORMATTER.convert_field(value, conversion), spec)
        self.text += _escaped(plain).replace(_OPEN, "{").replace(_CLOSE, "}")

    def reference(self, value: Any, how: str, open: str = "{", close: str = "}") -> str:
        """What stands for the next value."""
        self.values.append(value)
        return f"{open}{len(self.values) - 1}{how}{close}"


_OPEN, _CLOSE = "\ue000", "\ue001"  # braces of references in text whose own braces are yet to be escaped


@dataclass(frozen=True, eq=False)
class _Mark:
    """Stands for a tensor in the repr of a pytree."""

    template: _Template
    value: Any

    def __repr__(self) -> str:
        return self.template.reference(self.value, "!r", _OPEN, _CLOSE)


def _example(value: Any) -> Any:
    """Something that is formatted as the value is."""
    if getattr(value, "ndim", 0):
        return value.shape
    dtype = getattr(value, "dtype", torch.float64)
    return 0j if dtype.is_complex else 0.0 if dtype.is_floating_point else False if dtype == torch.bool else 0


def _varies(x: Any) -> bool:
    return isinstance(x, (Tensor, Array, torch.SymFloat))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
