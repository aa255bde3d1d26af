"""Sample calls of operations, one list per family: what the rule machine runs.

Dims are 4, 5, 6 and the like, so that two and three ranks cut them evenly, unevenly and into empty parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale_fn.sharding.graph import dtype_text
from vescale_fn.sharding.rules.pointwise import is_pointwise

aten = torch.ops.aten

f64, i64, c128 = torch.float64, torch.int64, torch.complex128


@dataclass(frozen=True)
class T:
    """A random tensor: normal for floats, or within 0 and 1; integers in [low, high); bools that say whether such
    integers are positive."""

    shape: tuple[int, ...]
    dtype: torch.dtype = f64
    low: int = -3
    high: int = 4
    unit: bool = False

    def __repr__(self) -> str:
        return f"{'' if self.dtype is f64 else dtype_text(self.dtype)}{list(self.shape)}"

    def make(self, generator: torch.Generator) -> torch.Tensor:
        if self.unit:
            return torch.rand(self.shape, dtype=self.dtype, generator=generator)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            return torch.randn(self.shape, dtype=self.dtype, generator=generator)
        whole = torch.randint(self.low, self.high, self.shape, generator=generator)
        return whole > 0 if self.dtype is torch.bool else whole.to(self.dtype)


def t(*shape: int, dtype: torch.dtype = f64, low: int = -3, high: int = 4) -> T:
    return T(shape, dtype, low, high)


UNIT = T((4, 5), unit=True)


@dataclass(frozen=True, eq=False)
class Sample:
    """A call of `op`; the T among its arguments become tensors, the same on every run."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(1)

        def make(tree: Any) -> Any:
            if isinstance(tree, T):
                return tree.make(generator)
            if isinstance(tree, (tuple, list)):
                return type(tree)(make(x) for x in tree)
            return tree

        return make(self.args), {k: make(v) for k, v in self.kwargs.items()}

    @property
    def returns_several(self) -> bool:
        """Whether it returns a list or a tuple, be it of one."""
        returns = self.op._schema.returns
        return len(returns) > 1 or str(returns[0].type) != "Tensor"

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})".removeprefix("aten.")


def s(op: Any, *args: Any, **kwargs: Any) -> Sample:
    return Sample(op, args, kwargs)


POINTWISE = [
    s(aten.add.Tensor, t(4, 6), t(6)),
    s(aten.add.Tensor, t(4, 6), t(4, 1), alpha=3),
    s(aten.add.Tensor, t(4, 6), 10),
    s(aten.add.Scalar, t(4), 2.5),
    s(aten.add.Tensor, t(4, dtype=i64), t(4, dtype=i64)),
    s(aten.add.Tensor, t(4, dtype=torch.bool), t(4, dtype=torch.bool)),
    s(aten.sub.Tensor, t(2, 3, 4), t(3, 1)),
    s(aten.rsub.Tensor, t(4, 5), t(4, 5), alpha=2),
    s(aten.rsub.Scalar, t(4, 5), 2),
    s(aten.mul.Tensor, t(4, 6), t(4, 6)),
    s(aten.mul.Tensor, t(4, 6), t(5, 1, 1)),
    s(aten.mul.Scalar, t(4, 6), -2.5),
    s(aten.div.Scalar, t(4, 6), -2.0),
    s(aten.mul.Tensor, t(4, 6), -0.5),
    s(aten.mul.Tensor, t(4, dtype=i64), t(4)),
    s(aten.div.Tensor, t(5, 4), t(5, 1)),
    s(aten.div.Tensor_mode, t(5, 4), t(4), rounding_mode="floor"),
    s(aten.div.Tensor_mode, t(5, 4), t(4), rounding_mode=None),
    s(aten.div.Scalar_mode, t(5, 4), 2.0, rounding_mode="trunc"),
    s(aten.clamp.default, t(4, 5), -0.5, 0.5),
    s(aten.clamp.Tensor, t(4, 5), t(5), None),
    s(aten.clip.default, t(4, 5), None, 0.5),
    s(aten.clip.Tensor, t(4, 5), None, t(4, 1)),
    s(aten.where.self, t(4, 6, dtype=torch.bool), t(4, 6), t()),
    s(aten.masked_fill.Scalar, t(4, 6), t(6, dtype=torch.bool), 0),
    s(aten.masked_fill.Scalar, t(4, 6), t(6, dtype=torch.bool), -1.0),
    s(aten.masked_fill.Tensor, t(4, 6), t(4, 1, dtype=torch.bool), t()),
    s(aten._to_copy.default, t(4, 5), dtype=torch.float32),
    s(aten._to_copy.default, t(4, 5), dtype=i64),
    s(aten._to_copy.default, t(4, 5), dtype=torch.bool),
    s(aten._to_copy.default, t(4, 5, dtype=i64), dtype=f64),
    s(aten._to_copy.default, t(4, 5, dtype=torch.bool), dtype=f64),
    s(aten._to_copy.default, t(4, 5), dtype=c128),
    s(aten._to_copy.default, t(4, 5, dtype=i64), dtype=torch.int32),
    s(aten.clone.default, t(4, 5)),
    s(aten.alias.default, t(4, 5, dtype=torch.bool)),
    *(s(op, t(4, 5)) for op in (aten.detach.default, aten.alias_copy.default, aten.detach_copy.default)),
    s(aten.lift_fresh_copy.default, t(4)),
    s(aten._conj.default, t(4, 5, dtype=c128)),
    s(aten._conj_physical.default, t(4, 5, dtype=c128)),
    s(aten.conj_physical.default, t(4, 5, dtype=c128)),
    s(aten.resolve_conj.default, t(4, dtype=c128)),
    s(aten.resolve_neg.default, t(4)),
    s(aten._neg_view.default, t(4)),
    s(aten.abs.default, t(4, dtype=c128)),
    s(aten.complex.default, t(4, 5), t(5)),
    s(aten.polar.default, t(4, 5), t(4, 5)),
    s(aten.copy.default, t(4, 5), t(5)),
    s(aten.copy.default, t(4, 5, dtype=i64), t(4, 5)),
    s(aten.fill.Scalar, t(4, 5), 3.0),
    s(aten.fill.Tensor, t(4, 5), t()),
    s(aten.hardswish.default, t(4, 5)),
    s(aten.floor_divide.default, t(4, 5), t(5)),
    s(aten.floor_divide.Scalar, t(4, 5), 2),
    *[s(op, t(4, 5), t(4, 5)) for op in (aten.silu_backward.default, aten.tanh_backward.default)],
    *[s(op, t(4, 5), t(4, 5)) for op in (aten.sigmoid_backward.default, aten.gelu_backward.default)],
    s(aten.threshold_backward.default, t(4, 5), t(4, 5), 0.1),
    s(aten.hardswish_backward.default, t(4, 5), t(4, 5)),
    s(aten.hardtanh_backward.default, t(4, 5), t(4, 5), -1, 1),
    s(aten.hardsigmoid_backward.default, t(4, 5), t(4, 5)),
    s(aten.mish_backward.default, t(4, 5), t(4, 5)),
    s(aten.leaky_relu_backward.default, t(4, 5), t(4, 5), 0.1, False),
    s(aten.elu_backward.default, t(4, 5), 1.0, 1.0, 1.0, False, t(4, 5)),
    s(aten.softplus_backward.default, t(4, 5), t(4, 5), 1.0, 20.0),
    s(aten.hardshrink_backward.default, t(4, 5), t(4, 5), 0.5),
    s(aten.softshrink_backward.default, t(4, 5), t(4, 5), 0.5),
    s(aten.log_sigmoid_forward.default, t(4, 5)),
    s(aten.log_sigmoid_backward.default, t(4, 5), t(4, 5), t(4, 5)),
    s(aten._prelu_kernel.default, t(4, 5), t(5)),
    s(aten._prelu_kernel_backward.default, t(4, 5), t(4, 5), t(4, 5)),
    s(aten.native_dropout_backward.default, t(4, 5), t(4, 5, dtype=torch.bool), 2.0),
]

REDUCE = [
    s(aten.sum.default, t(4, 5)),
    s(aten.sum.default, t()),
    s(aten.sum.default, t(4, 6, dtype=torch.bool)),
    s(aten.sum.dim_IntList, t(4, 5, 6), [1]),
    s(aten.sum.dim_IntList, t(4, 5, 6), [0, 2], True),
    s(aten.sum.dim_IntList, t(4, 5), None),
    s(aten.sum.dim_IntList, t(4, 5), [0], dtype=i64),
    s(aten.sum.dim_IntList, t(4, 5, dtype=i64), [0]),
    s(aten.nansum.default, t(4, 5), [1]),
    s(aten.count_nonzero.dim_IntList, t(4, 5, dtype=i64), [0]),
    s(aten.count_nonzero.default, t(4, 5, dtype=i64)),
    *[s(op, t(4, 6), [1], k) for op in (aten.amax.default, aten.amin.default) for k in (False, True)],
    s(aten.amax.default, t(4, 2, dtype=i64)),
    s(aten.max.default, t(4, 5)),
    s(aten.min.default, t(2, dtype=i64)),
    s(aten.any.default, t(4, 5, dtype=torch.bool, low=-20, high=2)),
    s(aten.any.dim, t(4, 5, dtype=torch.bool, low=-4, high=2), 1, True),
    s(aten.any.dims, t(4, 5, 2, dtype=torch.bool, low=-8, high=2), [0, 2]),
    s(aten.any.dims, t(5, 6, dtype=torch.bool), []),
    s(aten.all.default, t(4, 5, dtype=torch.bool, low=0, high=20)),
    s(aten.all.dim, t(4, 5, dtype=torch.bool, low=0, high=12), 1, True),
    s(aten.all.dims, t(4, 5, 2, dtype=torch.bool, low=0, high=9), [0, 2]),
    s(aten.mean.default, t(4, 6)),
    s(aten.mean.dim, t(4, 6), [0]),
    s(aten.prod.default, t(4, 5)),
    s(aten.prod.dim_int, t(4, 5), 1),
    *[s(op, t(4, 6), 1) for op in (aten.max.dim, aten.min.dim)],
    s(aten.aminmax.default, t(4, 6), dim=0),
    *[s(op, t(4, 6), *a) for op in (aten.argmax.default, aten.argmin.default) for a in [(), (0,), (1, True)]],
    *[s(op, t(4, 6)) for op in (aten.var.default, aten.std.default)],
    *[s(op, t(4, 6), [1]) for op in (aten.var.dim, aten.std.dim)],
    *[
        s(op, t(4, 6), [0], correction=0, keepdim=True)
        for op in (aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction)
    ],
    s(aten.norm.Scalar, t(4, 6)),
    s(aten.norm.ScalarOpt_dim, t(4, 6), 2, [1]),
    s(aten.norm.ScalarOpt_dim_dtype, t(4, 6), 2, [1], True, dtype=f64),
    s(aten.linalg_vector_norm.default, t(4, 6)),
    s(aten.linalg_vector_norm.default, t(4, 6), 3, [0], True),
    s(aten.logsumexp.default, t(4, 6), [1]),
]

MATMUL = [
    s(aten.mm.default, t(4, 6), t(6, 4)),
    s(aten.mm.default, t(5, 1), t(1, 6)),
    s(aten.mm.default, t(4, 2, dtype=i64), t(2, 4, dtype=i64)),
    s(aten.bmm.default, t(2, 4, 6), t(2, 6, 5)),
    s(aten.mv.default, t(4, 6), t(6)),
    s(aten.dot.default, t(6), t(6)),
    s(aten.vdot.default, t(4, dtype=c128), t(4, dtype=c128)),
    s(aten.outer.default, t(6), t(5)),
    s(aten.ger.default, t(5), t(5)),
    s(aten.addmm.default, t(4), t(4, 6), t(6, 4)),
    s(aten.addmm.default, t(4, 1), t(4, 6), t(6, 5), beta=2, alpha=3),
    s(aten.baddbmm.default, t(2, 4, 4), t(2, 4, 6), t(2, 6, 4)),
    s(aten.addbmm.default, t(4, 4), t(2, 4, 6), t(2, 6, 4)),
    s(aten.addmv.default, t(4), t(4, 6), t(6)),
    s(aten.addr.default, t(4, 4), t(4), t(4)),
    s(aten.linear.default, t(2, 4, 6), t(5, 6)),
    s(aten.linear.default, t(4, 4, 6), t(4, 6), t(4)),
]

VIEW = [
    s(aten.view.default, t(4, 3, 5), [12, 5]),
    s(aten.view.default, t(12, 5), [4, 3, 5]),
    s(aten.view.default, t(4, 6), [-1]),
    s(aten.view.default, t(6, 4), [4, 6]),
    s(aten.view.default, t(5, 2), [1, 5, 1, 2]),
    s(aten.view.default, t(4, 1, 6), [2, 2, 2, 3]),
    s(aten.view.default, t(0, 4), [2, 0, 2]),
    s(aten.view.default, t(1), []),
    s(aten._unsafe_view.default, t(4, 4), [16]),
    s(aten.reshape.default, t(6, 6), [3, 2, 6]),
    s(aten._reshape_alias.default, t(4, 6), [24], [1]),
    s(aten.flatten.using_ints, t(2, 4, 3), 1),
    s(aten.unflatten.int, t(4, 6), 1, [2, 3]),
    s(aten.squeeze.default, t(2, 1, 4)),
    s(aten.squeeze.dim, t(2, 1, 4), 1),
    s(aten.squeeze.dim, t(2, 4), 0),
    s(aten.squeeze.dims, t(1, 4, 1), [0, 1]),
    s(aten.unsqueeze.default, t(4, 5), -1),
    s(aten.expand.default, t(4, 1), [2, 4, 6]),
    s(aten.expand.default, t(4, 5), [-1, -1]),
    s(aten.permute.default, t(4, 4, 5), [2, 0, -2]),
    s(aten.transpose.int, t(4, 5, 4), 0, -1),
    s(aten.transpose.int, t(), 0, -1),
    s(aten.t.default, t(4, 4)),
    s(aten.t_copy.default, t(4, 5)),
    s(aten.t.default, t(4)),
    s(aten.slice.Tensor, t(4, 6), 1, 1, 5),
    s(aten.slice.Tensor, t(4, 6), 1, 0, 9223372036854775807),
    s(aten.slice.Tensor, t(5, 4), 0, 0, 5, 2),
    s(aten.slice.Tensor, t(5, 12), 1, 4, 8),
    s(aten.slice.Tensor, t(5, 8), -1, -4),
    s(aten.slice.Tensor, t(4, 4), 0, 1, 3),
    s(aten.slice_backward.default, t(4, 4), [4, 6], 1, 1, 5, 1),
    s(aten.slice_backward.default, t(4, 4), [4, 12], 1, 4, 8, 1),
    s(aten.slice_backward.default, t(4, 6), [4, 6], 1, 0, 6, 1),
    s(aten.split.Tensor, t(5, 12), 4, -1),
    s(aten.split.Tensor, t(5, 4), 3),
    s(aten.split.Tensor, t(4, 4), 4),
    s(aten.split_with_sizes.default, t(12, 4), [4, 4, 4]),
    s(aten.split_with_sizes.default, t(4, 6), [2, 4], 1),
    s(aten.unsafe_split.Tensor, t(4, 4), 2),
    s(aten.unsafe_split_with_sizes.default, t(4, 8), [4, 4], 1),
    s(aten.split_copy.Tensor, t(4, 8), 4, 1),
    s(aten.split_with_sizes_copy.default, t(8, 2), [4, 4]),
    *(s(op, t(3, 4, 4), 1) for op in (aten.unbind.int, aten.unbind_copy.int)),
    *(s(op, t(4, 4, 4), 0, 0, 2) for op in (aten.diagonal.default, aten.diagonal_copy.default)),
    s(aten.diagonal_backward.default, t(4, 4), [4, 4, 4], 0, 0, 2),
    s(aten.unfold.default, t(4, 6), 1, 2, 2),
    s(aten.diag_embed.default, t(4, 4), 1, 0, 2),
    s(aten.unfold_backward.default, t(4, 5, 2, 3), [4, 6, 2], 1, 3, 1),
    s(aten.as_strided.default, t(4, 4), [2, 4], [4, 1]),
    s(aten.slice_scatter.default, t(4, 6), t(4, 4), 1, 1, 5),
    s(aten.slice_scatter.default, t(4, 6), t(4, 6), 1),
    s(aten.select_scatter.default, t(4, 4), t(4), 0, 2),
    s(aten.view_as_real.default, t(4, 5, dtype=c128)),
    s(aten.view_as_complex.default, t(4, 5, 2)),
]

SHAPE = [
    s(aten.cat.default, [t(4, 4), t(4, 4)], 1),
    s(aten.cat.default, [t(4, 6), t(2, 6)]),
    s(aten.cat.default, [t(0), t(4, 6), t(4, 6)]),
    s(aten.cat.default, [t(4, 6)]),
    s(aten.stack.default, [t(4, 4), t(4, 4), t(4, 4)], -1),
    s(aten.constant_pad_nd.default, t(4, 6), [1, 2]),
    s(aten.constant_pad_nd.default, t(4, 6), [0, 0, -1, 1], 2.0),
    s(aten.flip.default, t(4, 6), [1]),
    s(aten.flip.default, t(4, 6), []),
    s(aten.roll.default, t(4, 6), [1], [0]),
    s(aten.roll.default, t(4, 6), [5]),
    s(aten.repeat.default, t(4, 6), [1, 3]),
    s(aten.repeat.default, t(4, 6), [2, 2, 1]),
    s(aten.tril.default, t(4, 4)),
    s(aten.rot90.default, t(4, 4, 5), 1, [0, 1]),
    *[s(aten.rot90.default, t(4, 5), k, [0, 1]) for k in (0, 2, 3)],
    s(aten.glu.default, t(4, 6), -1),
    s(aten.glu_backward.default, t(4, 3), t(4, 6), 1),
    *[s(op, t(2, 4, 4), [1, 2]) for op in (aten.reflection_pad1d.default, aten.replication_pad1d.default)],
    *[s(op, t(4, 4, 4), [1, 2, 0, 1]) for op in (aten.reflection_pad2d.default, aten.replication_pad2d.default)],
    *[s(op, t(2, 3, 3, 3), [1] * 6) for op in (aten.reflection_pad3d.default, aten.replication_pad3d.default)],
    s(aten.reflection_pad1d_backward.default, t(4, 7), t(4, 4), [1, 2]),
    s(aten.replication_pad1d_backward.default, t(4, 7), t(4, 4), [1, 2]),
    s(aten.reflection_pad2d_backward.default, t(4, 5, 7), t(4, 4, 4), [1, 2, 0, 1]),
    s(aten.replication_pad2d_backward.default, t(4, 5, 7), t(4, 4, 4), [1, 2, 0, 1]),
    s(aten.reflection_pad3d_backward.default, t(2, 5, 5, 5), t(2, 3, 3, 3), [1] * 6),
    s(aten.replication_pad3d_backward.default, t(2, 5, 5, 5), t(2, 3, 3, 3), [1] * 6),
    s(aten.pixel_shuffle.default, t(2, 12, 4, 3), 2),
    s(aten.pixel_unshuffle.default, t(2, 3, 8, 6), 2),
    s(aten.im2col.default, t(2, 4, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    s(aten.col2im.default, t(2, 16, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    s(aten.triu.default, t(2, 4, 6), 1),
]

FACTORY = [
    s(aten.full.default, [4, 5], 2.0),
    s(aten.full.default, [4, 5], 0.0),
    s(aten.zeros.default, [4, 6]),
    s(aten.ones.default, [4, 6]),
    s(aten.scalar_tensor.default, 0.0),
    s(aten.arange.default, 5),
    s(aten.arange.start, 2, 8),
    s(aten.arange.start_step, 2, 12, 2),
    s(aten.linspace.default, 0, 1, 6),
    s(aten.eye.default, 4),
    s(aten.eye.m, 4, 6),
    s(aten.tril_indices.default, 3, 3),
    s(aten.triu_indices.default, 3, 4),
]

FFT = [
    s(aten._fft_c2c.default, t(4, 6, dtype=c128), [1], 0, True),
    s(aten._fft_r2c.default, t(4, 6), [1], 0, True),
    s(aten._fft_c2r.default, t(6, 4, dtype=c128), [0], 0, 10),
]


def pointwise_ops() -> Iterator[Any]:
    """Every overload that torch declares pointwise, that changes none of its arguments and draws no random numbers."""
    known = {
        n.removeprefix("aten::").partition(".")[0] for n in torch._C._dispatch_get_all_op_names() if n[:6] == "aten::"
    }
    for name in sorted(known):  # dir(aten) has only what was used before
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            for overload in packet.overloads():
                op = getattr(packet, overload)
                random = torch.Tag.nondeterministic_seeded in op.tags
                if is_pointwise(op) and not random and not op._schema.is_mutable:
                    yield op


def sample_from_schema(op: Any) -> Sample | None:
    """A call of a pointwise operation made of its schema: tensors that broadcast, numbers where numbers are asked."""
    for dtype in (f64, i64, torch.bool):
        shapes = iter([(4, 5), (5,), (4, 1), (4, 5)])
        args, kwargs = [], {}
        for a in op._schema.arguments:
            kind = str(a.type)
            if kind == "Tensor":
                value: Any = T(next(shapes), dtype, 1, 5)
            elif a.has_default_value():
                continue
            else:
                value = False if kind == "bool" else 2
            if a.kwarg_only:
                kwargs[a.name] = value
            else:
                args.append(value)
        sample = Sample(op, tuple(args), kwargs)
        try:
            made, named = sample.tensors()
            op(*made, **named)
        except (RuntimeError, TypeError, ValueError):
            continue
        return sample
    return None


_LOSSES = [
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
]
_LOSSES_BACKWARD: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mse_loss_backward.default, ()),
    (aten.smooth_l1_loss_backward.default, (1.0,)),
    (aten.huber_loss_backward.default, (1.0,)),
    (aten.soft_margin_loss_backward.default, ()),
]
LOSS = [
    *[s(op, t(4, 5), t(4, 5), reduction=r) for op in _LOSSES for r in (0, 1, 2)],
    *[s(op, t(4, 5), t(4, 5), t(4, 5), 0, *rest) for op, rest in _LOSSES_BACKWARD],
    *[s(op, t(), t(4, 5), t(4, 5), r, *rest) for op, rest in _LOSSES_BACKWARD for r in (1, 2)],
    s(aten.binary_cross_entropy_with_logits.default, t(4, 5), t(4, 5), t(5), t(5), 2),
    s(aten.binary_cross_entropy.default, UNIT, UNIT, None, 2),
    s(aten.binary_cross_entropy.default, UNIT, UNIT, t(5), 0),
    s(aten.binary_cross_entropy_backward.default, t(4, 5), UNIT, UNIT, t(4, 5), 0),
    s(aten.binary_cross_entropy_backward.default, t(), UNIT, UNIT, None, 2),
]

LINALG = [
    s(aten.linalg_cross.default, t(4, 3), t(4, 3)),
    s(aten.linalg_cross.default, t(3, 4), t(3, 1), dim=0),
    s(aten._linalg_det.default, t(4, 2, 2)),
    s(aten._linalg_slogdet.default, t(4, 2, 2)),
    s(aten.linalg_inv_ex.default, t(4, 2, 2)),
    s(aten.linalg_cholesky_ex.default, t(4, 2, 2)),
    s(aten.linalg_lu_factor_ex.default, t(4, 2, 2)),
    s(aten.linalg_qr.default, t(4, 3, 2)),
    s(aten.linalg_eig.default, t(4, 2, 2)),
    s(aten._linalg_eigh.default, t(4, 2, 2)),
    s(aten._linalg_svd.default, t(4, 3, 2)),
    s(aten.linalg_solve_triangular.default, t(4, 2, 2), t(4, 2, 3), upper=True),
    s(aten.linalg_solve_triangular.default, t(2, 2), t(4, 2), upper=True, left=False),
    s(aten.linalg_lu.default, t(4, 3, 2)),
    s(aten.linalg_matrix_exp.default, t(4, 2, 2)),
    s(aten.trace.default, t(4, 5)),
    s(aten._linalg_solve_ex.default, t(4, 2, 2), t(4, 2, 3)),
    s(aten._linalg_solve_ex.default, t(4, 2, 2), t(4, 2)),
    s(aten._linalg_solve_ex.default, t(2, 2), t(4, 2), left=False),
    s(aten.cholesky_solve.default, t(4, 2, 3), t(4, 2, 2)),
    s(aten._cdist_forward.default, t(4, 5, 2), t(4, 6, 2), 1.5, None),
    s(aten._cdist_backward.default, t(4, 4), t(4, 2), t(4, 2), 2.0, t(4, 4, low=1)),
]

_GIVEN = {sample.op for sample in POINTWISE}
FROM_SCHEMA = [sample_from_schema(op) for op in pointwise_ops() if op not in _GIVEN]

SAMPLES = [*POINTWISE, *REDUCE, *MATMUL, *VIEW, *SHAPE, *FACTORY, *FFT, *LOSS, *LINALG]
