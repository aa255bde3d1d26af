"""Convolution, pooling and resampling: batch, channels and groups are free, spatial dims are whole.

Channels are `(g c)`: g groups of c. The bias is added once per output, so where it is present the input channels,
which are contracted, must be whole; `vescale_fn.decompose` splits it off when the user shards them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.norm import results_text
from vescale_fn.sharding.rules.registry import Entry, bound_args, form, parse_rule
from vescale_fn.sharding.rules.rule import Rule

aten = torch.ops.aten


def _space(stem: str, n: int) -> str:
    return " ".join(f"!{stem}{i}" for i in range(n))


def _unrelated(eqn: Eqn) -> Rule:
    """Every dim whole, and none tied to another."""
    left = [" ".join(f"!x{i}_{d}" for d, _ in enumerate(v.shape)) for i, v in enumerate(eqn.operands)]
    right = [" ".join(f"!y{i}_{d}" for d, _ in enumerate(v.shape)) for i, v in enumerate(eqn.outs)]
    return parse_rule(f"{', '.join(left)} -> {results_text(eqn, right)}", eqn)


def _convolution(eqn: Eqn) -> Rule:
    """Forward and backward. A transposed convolution has its weight's channels the other way round."""
    args = bound_args(eqn)
    if any(0 in v.shape for v in eqn.operands):  # torch checks no sizes then
        return _unrelated(eqn)
    n = len(args["weight"].shape) - 2
    backward = "grad_output" in args
    biased = args["output_mask"][2] if backward else args["bias"] is not None
    i = "!i" if biased else "i"
    weight = f"(g {i}) o" if args["transposed"] else f"(g o) {i}"
    names = {
        "grad_output": f"b (g o) {_space('out', n)}",
        "input": f"b (g {i}) {_space('in', n)}",
        "weight": f"{weight} {_space('k', n)}",
        "bias": "(g o)",
    }
    left = ", ".join(f"{name}: {dims}" for name, dims in names.items())
    results = [names["input"], names["weight"], names["bias"]] if backward else [names["grad_output"]]
    bias = {"bias"} if biased else set()
    linear = [{"grad_output"}] if backward else [{"input"} | bias, {"weight"} | bias]
    return parse_rule(f"{left} -> {results_text(eqn, results)}", eqn, linear=linear, sizes={"g": args["groups"]})


def _planes(n: int, linear: tuple[set[int | str], ...] = ()) -> Entry:
    """Operations on the last n dims, the same for every leading position."""

    def entry(eqn: Eqn) -> Rule:
        grids: dict[tuple[int, ...], str] = {}

        def text(shape: tuple[int, ...]) -> str:
            return f"... {grids.setdefault(shape[-n:], _space(f'x{len(grids)}_', n))}"

        left = ", ".join(text(v.shape) for v in eqn.operands)
        return parse_rule(f"{left} -> {', '.join(text(v.shape) for v in eqn.outs)}", eqn, linear=linear)

    return entry


def _grid_backward(eqn: Eqn) -> Rule:
    """Gradients of the image, to which every output adds, and of the positions, to which every channel adds."""
    image, grid = "b c !h !w", "b i j !xy"
    return parse_rule(f"b c i j, {image}, {grid} -> {results_text(eqn, [image, grid])}", eqn, linear=[{0}])


_FIRST: tuple[set[int | str], ...] = ({0},)

# Per number of spatial dims: operations that are linear in their first operand, and those that are not.
_LINEAR = {
    1: [
        aten.upsample_nearest1d.default,
        aten.upsample_nearest1d_backward.default,
        aten._upsample_nearest_exact1d.default,
        aten._upsample_nearest_exact1d_backward.default,
        aten.upsample_linear1d.default,
        aten.upsample_linear1d_backward.default,
    ],
    2: [
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.adaptive_max_pool2d_backward.default,
        aten.max_unpool2d.default,
        aten.upsample_nearest2d.default,
        aten.upsample_nearest2d_backward.default,
        aten._upsample_nearest_exact2d.default,
        aten._upsample_nearest_exact2d_backward.default,
        aten.upsample_bilinear2d.default,
        aten.upsample_bilinear2d_backward.default,
        aten._upsample_bilinear2d_aa.default,
        aten._upsample_bilinear2d_aa_backward.default,
        aten.upsample_bicubic2d.default,
        aten.upsample_bicubic2d_backward.default,
    ],
    3: [
        aten.avg_pool3d.default,
        aten.avg_pool3d_backward.default,
        aten._adaptive_avg_pool3d.default,
        aten._adaptive_avg_pool3d_backward.default,
        aten.max_pool3d_with_indices_backward.default,
        aten.max_unpool3d.default,
        aten.upsample_nearest3d.default,
        aten.upsample_nearest3d_backward.default,
        aten._upsample_nearest_exact3d.default,
        aten._upsample_nearest_exact3d_backward.default,
        aten.upsample_trilinear3d.default,
        aten.upsample_trilinear3d_backward.default,
    ],
}
_OTHER = {
    2: [aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default],
    3: [aten.max_pool3d_with_indices.default],
}

ENTRIES: Mapping[Any, Entry] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution,
    aten.grid_sampler_2d.default: form("b c !h !w, b i j !xy -> b c i j", linear=[{0}]),
    aten.grid_sampler_2d_backward.default: _grid_backward,
    **{op: _planes(n, _FIRST) for n, ops in _LINEAR.items() for op in ops},
    **{op: _planes(n) for n, ops in _OTHER.items() for op in ops},
}
