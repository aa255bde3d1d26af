"""Sample calls of normalisations, attention, convolution, indexing and order; see op_samples."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from op_samples import Sample, T, i64, s, t

aten = torch.ops.aten


class Ordered(T):
    """Rising along the last dim."""

    def make(self, generator: torch.Generator) -> torch.Tensor:
        return super().make(generator).sort().values


class Permuted(T):
    """Each position of dim 0 once in every line."""

    def make(self, generator: torch.Generator) -> torch.Tensor:
        return torch.rand(self.shape, generator=generator).argsort(0)


class Bags(T):
    """Where bags start, or which bag is next: 0, 1, ... up to 3."""

    def make(self, generator: torch.Generator) -> torch.Tensor:
        return torch.arange(self.shape[0]).clamp(max=3)


def at(*shape: int, size: int) -> T:
    """Positions in a dim of `size`."""
    return t(*shape, dtype=i64, low=0, high=size)


# --- softmax and norms ----------------------------------------------------------------------------------------------

NORM = [
    *(s(op, t(4, 5, 6), dim, False) for op in (aten._softmax.default, aten._log_softmax.default) for dim in (-1, 1)),
    s(aten._softmax.default, t(), 0, False),
    s(aten._safe_softmax.default, t(4, 5), -1),
    *(
        s(op, t(4, 5, 6), t(4, 5, 6), dim, torch.float64)
        for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
        for dim in (2, 0)
    ),
    s(aten.native_layer_norm.default, t(4, 5, 6), [6], t(6), t(6), 1e-5),
    s(aten.native_layer_norm.default, t(4, 5, 6), [5, 6], None, None, 1e-5),
    s(
        aten.native_layer_norm_backward.default,
        *(t(4, 5, 6), t(4, 5, 6), [6], t(4, 5, 1), t(4, 5, 1), t(6), t(6), [True, True, True]),
    ),
    s(aten._fused_rms_norm.default, t(4, 5, 6), [6], t(6), 1e-5),
    s(aten._fused_rms_norm.default, t(4, 5, 6), [5, 6], None, None),
    s(aten.native_group_norm.default, t(5, 12, 3), t(12), t(12), 5, 12, 3, 4, 1e-5),
    s(aten.native_group_norm.default, t(5, 12, 2, 2), None, None, 5, 12, 4, 3, 1e-5),
    s(
        aten.native_group_norm_backward.default,
        *(t(5, 12, 3), t(5, 12, 3), t(5, 4), t(5, 4), t(12), 5, 12, 3, 4, [True, True, True]),
    ),
    s(aten.native_batch_norm.default, t(4, 5, 3), t(5), t(5), None, None, True, 0.1, 1e-5),
    s(aten.native_batch_norm.default, t(4, 5, 3), t(5), t(5), t(5), T((5,), unit=True), False, 0.1, 1e-5),
    s(aten._native_batch_norm_legit.no_stats, t(4, 5), None, None, True, 0.1, 1e-5),
    s(aten._native_batch_norm_legit_functional.default, t(4, 5, 3), t(5), t(5), t(5), t(5), True, 0.1, 1e-5),
    s(
        aten.native_batch_norm_backward.default,
        *(t(4, 5, 3), t(4, 5, 3), t(5), None, None, t(5), t(5), True, 1e-5, [True, True, True]),
    ),
]

# --- order ----------------------------------------------------------------------------------------------------------

_ONE_DIM = [
    aten.sort.default,
    aten.argsort.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.logcumsumexp.default,
]
ORDER = [
    *(s(op, t(4, 5, 6), dim) for op, dim in product(_ONE_DIM, (1, -1))),
    s(aten.sort.stable, t(4, 5), stable=True, dim=0),
    s(aten.argsort.stable, t(4, 5), stable=True, dim=0),
    s(aten.topk.default, t(4, 5, 6), 3, 1),
    s(aten.kthvalue.default, t(4, 5, 6), 2, 1, True),
    s(aten.median.dim, t(4, 5), 0, True),
    s(aten.cumsum.default, t(), 0),
    *(s(op, t(4, 5)) for op in (aten.median.default, aten.nanmedian.default)),
    s(aten.isin.Tensor_Tensor, t(4, 5, dtype=i64), t(2, 3, dtype=i64)),
    s(aten.isin.Tensor_Tensor, t(4, 5, dtype=i64), t(3, dtype=i64), invert=True),
    s(aten.searchsorted.Tensor, Ordered((6,)), t(4, 5)),
    s(aten.searchsorted.Tensor, Ordered((4, 6)), t(4, 5)),
    s(aten.searchsorted.Tensor, t(6), t(4, 5), sorter=Permuted((6,), i64)),
    s(aten.bucketize.Tensor, t(4, 5), Ordered((6,))),
]

# --- positions ------------------------------------------------------------------------------------------------------

_SCATTERS = [aten.scatter.src, aten.scatter_add.default]
INDEX = [
    s(aten.select.int, t(4, 4, 5), 1, -1),
    s(aten.select.int, t(6, 5), 0, 2),
    s(aten.select_backward.default, t(4, 5), [4, 6, 5], 1, 2),
    s(aten.embedding.default, t(6, 5), at(4, 3, size=6)),
    s(aten.embedding.default, t(5, 4), at(4, size=5), 1),
    s(aten.embedding_dense_backward.default, t(4, 3, 5), at(4, 3, size=6), 6, -1, False),
    s(aten.embedding_dense_backward.default, t(4, 3, 5), at(4, 3, size=6), 6, 2, False),
    s(aten.embedding_dense_backward.default, t(6, 4), at(6, size=5), 5, -1, True),
    s(aten.gather.default, t(4, 6), 1, at(4, 3, size=6)),
    s(aten.gather.default, t(4, 6), 0, at(5, 6, size=4)),
    s(aten.gather.default, t(4, 6, 5), -1, at(2, 6, 3, size=5)),
    s(aten.gather.default, t(), 0, at(size=1)),
    s(aten.gather.default, t(4), 0, at(size=4)),
    s(aten.scatter.value, t(4), 0, at(size=4), 2.0),
    s(aten.index_select.default, t(), 0, at(1, size=1)),
    s(aten.scatter.value, t(4, 6), 1, at(4, 3, size=6), 2.0),
    s(aten.scatter.value, t(4, 6), 1, at(4, 1, size=6), 0),
    s(aten.scatter.src, t(4, 6), 1, at(4, 1, size=6), t(4, 1)),
    s(aten.scatter.src, t(4, 6), 1, at(4, 1, size=6), t(4, 3)),
    s(aten.scatter.src, t(6, 5), 0, Permuted((4, 5), i64), t(4, 5)),
    s(aten.scatter_add.default, t(4, 6), 1, at(4, 5, size=6), t(4, 5)),
    s(aten.scatter_add.default, t(4, 6), 1, at(3, 5, size=6), t(4, 6)),
    *(s(aten.scatter_reduce.two, t(4, 6), 1, at(4, 5, size=6), t(4, 5), r) for r in ("sum", "amax", "prod")),
    s(aten.scatter_reduce.two, t(4, 6), 1, at(4, 5, size=6), t(4, 5), "mean", include_self=False),
    s(aten.index_select.default, t(4, 6, 5), 1, at(3, size=6)),
    s(aten.index_select.default, t(4, 6), 0, at(size=4)),
    s(aten.index_add.default, t(4, 6), 1, at(5, size=6), t(4, 5)),
    s(aten.index_add.default, t(4, 6), 0, at(3, size=4), t(3, 6), alpha=2),
    s(aten.index_copy.default, t(6, 5), 0, Permuted((4,), i64), t(4, 5)),
    s(aten.index_fill.int_Scalar, t(4, 6), 1, at(3, size=6), 2.0),
    s(aten.index_fill.int_Scalar, t(4, 6), 1, at(3, size=6), 0),
    *(
        sample
        for op in (aten.index.Tensor, aten._unsafe_index.Tensor)
        for sample in (
            s(op, t(4, 6, 5), [at(3, 4, size=4)]),
            s(op, t(4, 6, 5), [None, t(3, dtype=i64, low=-6, high=6)]),
            s(op, t(4, 6, 5), [at(4, 1, size=4), at(3, size=6)]),
            s(op, t(4, 6, 5), [at(3, size=4), None, at(3, size=5)]),
        )
    ),
    *(
        sample
        for op in (aten.index_put.default, aten._unsafe_index_put.default)
        for sample in (
            s(op, t(6, 5), [Permuted((4,), i64)], t(4, 5)),
            s(op, t(4, 6), [None, t(5, dtype=i64, low=-6, high=6)], t(4, 5), True),
            s(op, t(4, 6, 5), [at(4, 1, size=4), at(3, size=6)], t(5), True),
            s(op, t(4, 6, 5), [at(3, size=4), None, at(3, size=5)], t(3, 1), True),
        )
    ),
    s(aten.take.default, t(4, 6), at(5, 2, size=24)),
]

# --- attention ------------------------------------------------------------------------------------------------------

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _flash(heads: int, kv_heads: int, causal: bool = False, mask: T | None = None) -> Sample:
    q, kv = t(3, heads, 5, 4), t(3, kv_heads, 5, 4)
    return s(_FLASH, q, kv, kv, 0.0, causal, attn_mask=mask)


def _flash_backward(heads: int, kv_heads: int, causal: bool = False, mask: T | None = None) -> Sample:
    q, kv = t(3, heads, 5, 4), t(3, kv_heads, 5, 4)
    return s(_FLASH_BACKWARD, q, q, kv, kv, q, t(3, heads, 5), 0.0, causal, attn_mask=mask)


ATTENTION = [
    make(*heads, **options)
    for make in (_flash, _flash_backward)
    for heads in ((4, 4), (6, 3), (4, 1))
    for options in ({}, {"causal": True})
] + [
    make(4, 2, mask=t(*shape))
    for make in (_flash, _flash_backward)
    for shape in ((5, 5), (3, 1, 5, 5), (1, 4, 1, 5), (3, 4, 5, 5))
]

# --- convolution and pooling ----------------------------------------------------------------------------------------

_PLAIN_2D: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0])
_PLAIN_1D: tuple[Any, ...] = ([1], [1], [1], False, [0])
_TRANSPOSED_1D: tuple[Any, ...] = ([1], [1], [1], True, [0])
_CONV, _CONV_BACKWARD = aten.convolution.default, aten.convolution_backward.default

CONV = [
    s(_CONV, t(4, 5, 6), t(6, 5, 3), None, *_PLAIN_1D, 1),
    s(_CONV, t(4, 5, 6), t(6, 5, 3), t(6), *_PLAIN_1D, 1),
    s(_CONV, t(4, 12, 6), t(8, 3, 3), None, *_PLAIN_1D, 4),
    s(_CONV, t(4, 12, 6), t(9, 4, 3), t(9), *_PLAIN_1D, 3),
    s(_CONV, t(4, 5, 6), t(5, 1, 3), None, *_PLAIN_1D, 5),
    s(_CONV, t(4, 5, 6), t(5, 6, 3), None, *_TRANSPOSED_1D, 1),
    s(_CONV, t(4, 12, 6), t(12, 2, 3), t(8), *_TRANSPOSED_1D, 4),
    s(_CONV, t(4, 4, 5, 5), t(6, 2, 3, 3), None, *_PLAIN_2D, 2),
    s(_CONV_BACKWARD, t(4, 6, 6), t(4, 5, 6), t(6, 5, 3), [6], *_PLAIN_1D, 1, [True, True, True]),
    s(_CONV_BACKWARD, t(4, 6, 6), t(4, 5, 6), t(6, 5, 3), None, *_PLAIN_1D, 1, [True, True, False]),
    s(_CONV_BACKWARD, t(4, 8, 6), t(4, 12, 6), t(8, 3, 3), [8], *_PLAIN_1D, 4, [True, True, True]),
    s(_CONV_BACKWARD, t(4, 9, 6), t(4, 12, 6), t(9, 4, 3), None, *_PLAIN_1D, 3, [True, True, False]),
    s(_CONV_BACKWARD, t(4, 8, 6), t(4, 12, 6), t(12, 2, 3), None, *_TRANSPOSED_1D, 4, [True, True, False]),
    s(aten.max_pool2d_with_indices.default, t(4, 5, 4, 6), [2, 2]),
    s(
        aten.max_pool2d_with_indices_backward.default,
        *(t(4, 5, 2, 3), t(4, 5, 4, 6), [2, 2], [2, 2], [0, 0], [1, 1], False, at(4, 5, 2, 3, size=24)),
    ),
    s(aten.grid_sampler_2d.default, t(4, 5, 3, 2), t(4, 5, 6, 2), 0, 0, False),
    s(
        aten.grid_sampler_2d_backward.default,
        *(t(4, 5, 5, 6), t(4, 5, 3, 2), t(4, 5, 6, 2), 0, 0, False, [True, True]),
    ),
    s(
        aten.grid_sampler_2d_backward.default,
        *(t(4, 5, 5, 6), t(4, 5, 3, 2), t(4, 5, 6, 2), 0, 0, False, [False, True]),
    ),
    s(aten._upsample_nearest_exact1d.default, t(4, 5, 3), [6], None),
    s(aten._upsample_nearest_exact1d_backward.default, t(4, 5, 6), [6], [4, 5, 3], None),
    s(aten._upsample_nearest_exact3d_backward.default, t(4, 5, 4, 4, 4), [4, 4, 4], [4, 5, 2, 2, 2], None, None, None),
    s(aten._upsample_nearest_exact3d.default, t(4, 5, 2, 2, 2), [4, 4, 4], None, None, None),
    s(aten.avg_pool2d.default, t(5, 4, 6), [2, 2]),
    s(aten.avg_pool2d_backward.default, t(4, 5, 2, 3), t(4, 5, 4, 6), [2, 2], [2, 2], [0, 0], False, True, None),
    s(aten._adaptive_avg_pool2d.default, t(4, 5, 4, 6), [2, 2]),
    s(aten._adaptive_avg_pool2d_backward.default, t(4, 5, 2, 2), t(4, 5, 4, 6)),
    s(aten.adaptive_max_pool2d.default, t(4, 5, 4, 6), [2, 2]),
    s(
        aten.adaptive_max_pool2d_backward.default,
        *(t(4, 5, 2, 2), t(4, 5, 4, 6), at(4, 5, 2, 2, size=24)),
    ),
    s(aten.max_pool3d_with_indices.default, t(4, 5, 2, 2, 4), [2, 2, 2]),
    s(
        aten.max_pool3d_with_indices_backward.default,
        *(t(4, 5, 1, 1, 2), t(4, 5, 2, 2, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False),
        at(4, 5, 1, 1, 2, size=16),
    ),
    s(aten.avg_pool3d.default, t(4, 5, 2, 2, 4), [2, 2, 2]),
    s(
        aten.avg_pool3d_backward.default,
        *(t(4, 5, 1, 1, 2), t(4, 5, 2, 2, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
    ),
    s(aten._adaptive_avg_pool3d.default, t(4, 5, 2, 2, 4), [1, 2, 2]),
    s(aten._adaptive_avg_pool3d_backward.default, t(4, 5, 1, 2, 2), t(4, 5, 2, 2, 4)),
]

# names of resampling operations, and whether they ask for aligned corners
_RESAMPLE = {
    "upsample_nearest1d": False,
    "upsample_linear1d": True,
    "upsample_nearest2d": False,
    "_upsample_nearest_exact2d": False,
    "upsample_bilinear2d": True,
    "_upsample_bilinear2d_aa": True,
    "upsample_bicubic2d": True,
    "upsample_nearest3d": False,
    "upsample_trilinear3d": True,
}


def _resample(name: str, corners: bool) -> list[Sample]:
    dims = int(name.rstrip("_a")[-2])
    small, large, option = [2] * dims, [4] * dims, [False] * corners
    forward, backward = (getattr(aten, n).default for n in (name, f"{name}_backward"))
    return [
        s(forward, t(4, 5, *small), large, *option),
        s(backward, t(4, 5, *large), large, [4, 5, *small], *option),
    ]


CONV += [sample for name, corners in _RESAMPLE.items() for sample in _resample(name, corners)]

CONV += [
    s(aten.max_unpool2d.default, t(4, 5, 2, 3), Permuted((4, 5, 2, 3), i64), [4, 6]),
    s(aten.max_unpool3d.default, t(4, 5, 1, 2, 2), Permuted((4, 5, 1, 2, 2), i64), [2, 4, 4], [2, 2, 2], [0, 0, 0]),
]

# --- by place among all ---------------------------------------------------------------------------------------------


def _bag_backward(mode: int, weights: T | None) -> Sample:
    """`mode`: 0 sum, 1 mean, 2 maximum."""
    largest = at(4, 5, size=5) if mode == 2 else t(4, dtype=i64)
    return s(
        aten._embedding_bag_dense_backward.default,
        *(t(4, 5), at(6, size=5), Bags((6,), i64), t(4, dtype=i64, low=1, high=4), largest),
        *(5, False, mode, weights),
    )


MIXED = [
    *(s(aten.scatter.reduce, t(4, 6), 1, at(4, 5, size=6), t(4, 5), reduce=r) for r in ("add", "multiply")),
    s(aten.scatter.value_reduce, t(4, 6), 1, at(4, 5, size=6), 2.0, reduce="add"),
    s(aten.scatter.value_reduce, t(4, 6), 1, at(4, 5, size=6), -2.0, reduce="multiply"),
    s(aten.masked_scatter.default, t(4, 5), t(4, 5, dtype=torch.bool), t(20)),
    s(aten.masked_scatter_backward.default, t(4, 5), t(4, 5, dtype=torch.bool), [20]),
    *(s(aten.put.default, t(4, 6), at(5, 2, size=24), t(5, 2), accumulate) for accumulate in (False, True)),
    s(aten.block_diag.default, [t(4, 5), t(2, 3)]),
    s(aten.renorm.default, t(4, 5, 6), 2, 1, 0.5),
    s(aten.histc.default, t(4, 5), 4, -2, 2),
    s(aten.histc.default, t(4, 5), 4),
    *(
        s(aten.index_reduce.default, t(4, 6, 5), 1, at(3, size=6), t(4, 3, 5), r, include_self=i)
        for r, i in (("prod", True), ("mean", True), ("amax", False))
    ),
    *(
        s(op, t(5, 4), at(6, size=5), Bags((4,), i64), False, mode)
        for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
        for mode in (0, 1, 2)
    ),
    s(aten._embedding_bag.default, t(5, 4), at(6, size=5), Bags((4,), i64), False, 0, False, t(6)),
    *(_bag_backward(mode, None) for mode in (0, 1, 2)),
    _bag_backward(0, t(6)),
    s(
        aten._embedding_bag_backward.default,
        *(t(4, 5), at(6, size=5), Bags((4,), i64), Bags((6,), i64), t(4, dtype=i64, low=1, high=4)),
        *(t(4, dtype=i64), 5, False, 1, False, None),
    ),
    s(
        aten._embedding_bag_per_sample_weights_backward.default,
        *(t(4, 5), t(5, 5), at(6, size=5), Bags((4,), i64), Bags((6,), i64), 0),
    ),
]

SAMPLES = [*NORM, *ORDER, *INDEX, *ATTENTION, *CONV, *MIXED]
