"""The text of errors that a trace raises: what the step did, on which line, and the fix."""

from __future__ import annotations

from collections.abc import Mapping

from vescale_fn.sharding.graph import Source


class TraceError(RuntimeError):
    """The step does something that a traced program cannot do."""


def _at(source: Source) -> str:
    return f"{source}: {source.code}" if source.file else "an unknown line"


def reads_value(fn: str, source: Source) -> str:
    return (
        f"{fn} reads the value of a tensor (`if tensor:`, float(), .item(), .tolist()) at {_at(source)}\n"
        "A step is traced without values. Choose with torch.where, return the tensor and read it after the call, "
        "or pass the number as a Python argument."
    )


def data_dependent_shape(fn: str, op: str, source: Source) -> str:
    return (
        f"{fn}: the shape of the result of {op} depends on the values of a tensor, at {_at(source)}\n"
        "A step is traced with fixed shapes. Use a mask of fixed shape and torch.where instead of selecting elements."
    )


def random_without_key(fn: str, op: str, source: Source) -> str:
    return (
        f"{fn} calls the random operation {op} without a key, at {_at(source)}\n"
        "Its values would depend on the mesh and on how often the step ran. Pass a key to the step, and write "
        "`with vf.random.scope(key):` around the draw, inside the step; or switch the layer to eval mode."
    )


def writes_captured(fn: str, what: str, op: str, source: Source) -> str:
    return (
        f"{fn} writes in place ({op}) to {what}, at {_at(source)}\n"
        "A step is a pure function. Write to a copy (.clone()), return the new value, and pass it to the next call."
    )


def during(fn: str, source: Source) -> str:
    return f"while tracing {fn}, at {_at(source)}"


def float_became_static(fn: str, names: str) -> str:
    return (
        f"{fn} takes a decision that depends on the value of {names}, so a new program is made for each value. "
        "Compute with it in torch operations (torch.where, torch.clamp) to keep one program for all values."
    )


def bad_output(fn: str, index: int, kind: str) -> str:
    return f"{fn} returns a {kind} (leaf {index}). A step returns tensors, numbers, strings and None."


# ---- scan


def scan_extents(extents: Mapping[str, int | None]) -> str:
    found = ", ".join(f"{p or 'xs'}: {'0-d' if n is None else n}" for p, n in extents.items()) or "nothing"
    return (
        f"vf.scan: all of xs must have the same extent along dim 0, the number of iterations, but found {found}. "
        "Without xs, give length=."
    )


def empty_scan() -> str:
    return "vf.scan: there is nothing to iterate over (0 iterations). Leave the loop out, or pass at least one slice."


def scan_result(kind: str) -> str:
    return f"vf.scan: the body returned a {kind}. It must return a pair (carry, y); y may be None."


def carry_tree(before: object, after: object) -> str:
    return (
        f"vf.scan: the body got a carry of the form {before} and returned one of the form {after}. Return the carry in "
        "the form in which it came."
    )


def carry_leaf(path: str, before: str, after: str) -> str:
    return (
        f"vf.scan: the carry {path or 'leaf'} goes into the body as {before} and comes out as {after}. Shape and dtype "
        "must stay the same: convert the initial value, or the result."
    )


def gradient_across(fn: str, source: Source) -> str:
    return (
        f"{fn}: the body of a loop or call takes a gradient with respect to a tensor that it captures, while a "
        f"transform of torch.func is under way outside, at {_at(source)}\n"
        "Pass the tensor to the body instead: in the carry of vf.scan, or as an argument of vf.call."
    )
