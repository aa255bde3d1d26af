"""The text of errors about random numbers: what was given, and the fix."""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fn.sharding.graph import Source, dtype_text


def not_a_key(what: str, key: object) -> str:
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if shape is None:
        fix = f"Make one with vf.random.key({key})." if isinstance(key, int) else "Make one with vf.random.key(0)."
        return f"{what}: the key is {key!r}. {fix}"
    found = f"{what}: the key is a tensor {dtype_text(dtype)}{list(shape)}, and a key is i64[2]."
    if len(shape) > 1 and shape[-1] == 2:
        return f"{found} These are {list(shape[:-1])} keys: take one (keys[0]), or use torch.vmap over them."
    return f"{found} Make one with vf.random.key(0), or from another with vf.random.split."


def bad_seed(seed: object) -> str:
    return f"vf.random.key: the seed is {seed!r}. It must be an integer of 64 bits, such as 0."


def bad_probability(what: str, p: object) -> str:
    return f"{what}: p is {p}. It must be a probability, from 0 to 1."


def empty_range(low: object, high: object) -> str:
    return (
        f"vf.random.randint: low is {low} and high is {high}. high must be greater than low, and is not drawn itself."
    )


def bad_bounds(lower: object, upper: object) -> str:
    return f"vf.random.truncated_normal: lower is {lower} and upper is {upper}. upper must be greater than lower."


def bad_shape(what: str, shape: Sequence[int], batch: Sequence[int]) -> str:
    return f"{what}: shape is {list(shape)}, which does not end in {list(batch)}, the shape of what is drawn from."


def not_floating(what: str, dtype: object) -> str:
    return f"{what}: dtype is {dtype}. It must be a floating-point dtype; vf.random.randint and bits draw integers."


def key_reused(fn: str, first: Source, second: Source) -> str:
    return (
        f"{fn} draws twice with the same key, so both draws get the same numbers:\n"
        f"  {first}: {first.code}\n"
        f"  {second}: {second.code}\n"
        "Split it first: k1, k2 = vf.random.split(key). To use the same numbers twice, draw them once."
    )


# ---- ambient draws


def batched_key() -> str:
    return (
        "vf.random.scope: the key differs between the examples of torch.vmap, and randomness= decides there whether "
        "their draws do. Open the scope outside of vmap, or draw with the key: vf.random.dropout(key, x, p)."
    )


def array_key(key: object) -> str:
    return (
        f"vf.random.scope: the key is an Array, {key}, and the scope is not inside a step. Open the scope in the "
        "function that vf.pjit traces, or give it key.full()."
    )


def unknown_draw(op: str) -> str:
    return (
        f"{op} draws random numbers in a way that vf.random.scope does not know. Draw with a function of vf.random, "
        "or switch the layer to eval mode."
    )


def fused_attention(op: str) -> str:
    return (
        f"{op} drops in a kernel that has numbers of its own. Inside vf.random.scope call "
        "F.scaled_dot_product_attention, or choose the kernel that leaves dropout to torch: "
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)."
    )


def has_generator(op: str) -> str:
    return (
        f"{op} was given a generator= inside vf.random.scope, which has a key instead. Leave generator= out, or draw "
        "outside of the scope."
    )
