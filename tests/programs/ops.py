"""The statements that random programs are made of, by family.

`Op("F.embedding({i}, {w})", w="v d", i="i<v: ...")` is a statement with two operands. An operand's pattern names its
dims: a letter has one size in all of a statement (not 0 when it is a capital), a number is a size, `...` any dims.
Before a colon stands the kind: f float (when not named), i integer, b bool, c complex; `i<v` are integers below the
size of v.

In a text also stand, drawn where they are named: {d} and {e}, different dims of the first operand; {j} and {k}, a
position in {d} and a length; {j0}, a position in its first dim; {s} a shift; {bool}; {n[v]} the size of a letter;
{shape} and {order} for a view of the first operand; {spec} a spec for it; {v} the name of the result, where the text
is more than an expression.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Op:
    """A statement: text with holes, and patterns of its tensor operands in the order in which they are found."""

    text: str
    operands: dict[str, str] = field(default_factory=dict)


def op(text: str, **operands: str) -> Op:
    return Op(text, operands)


def unary(*texts: str, x: str = "...") -> list[Op]:
    return [op(text, x=x) for text in texts]


POINTWISE = [
    *unary("torch.sin({x})", "torch.tanh({x})", "-{x}", "{x} * 0.5", "{x} + 1.5", "torch.relu({x})"),
    *unary("{x}.exp() * 0.1", "{x} * {x}", "torch.sigmoid({x})", "{x}.clamp(-1, 1)", "{x}.clone()", "{x}.abs()"),
    *unary("F.gelu({x})", "F.silu({x})", "F.softplus({x})", "F.elu({x})", "F.leaky_relu({x})", "F.hardswish({x})"),
    *unary("torch.sqrt({x} * {x} + 1)", "torch.rsqrt({x}.abs() + 1)", "{x} ** 3", "torch.log1p({x}.abs())"),
    *unary("torch.erf({x})", "{x} / 3", "2 - {x}", "{x}.detach() + {x}", "torch.nan_to_num({x})"),
    *unary("F.gelu({x}, approximate='tanh')", "F.hardtanh({x})", "{x}.reciprocal().clamp(-2, 2)"),
    *[
        op(text, x="...", y="...")
        for text in (
            "{x} + {y}",
            "{x} - {y}",
            "{x} * {y}",
            "torch.maximum({x}, {y})",
            "torch.minimum({x}, {y})",
            "{x} / ({y} * {y} + 1)",
            "torch.atan2({x}, {y})",
            "torch.add({x}, {y}, alpha=0.5)",
            "torch.where({x} > {y}, {x}, {y} * 2)",
            "torch.lerp({x}, {y} + {x}, 0.3)",
            "torch.hypot({x}, {y} + 1)",
        )
    ],
    op("torch.addcmul({x}, {x}, {y}, value=0.5)", x="...", y="..."),
    op("torch.where({b}, {x}, 0.5)", x="...", b="b: ..."),
    op("{x}.masked_fill({b}, -1.0)", x="...", b="b: ..."),
    op("{x} > 0", x="..."),
    op("{x} <= {y}", x="...", y="..."),
    op("~{b}", b="b: ..."),
    op("{b} & {c}", b="b: ...", c="b: ..."),
    op("{b} ^ {c}", b="b: ...", c="b: ..."),
    op("{b}.to(torch.int64) * 2", b="b: ..."),
    op("{x} * {b}", x="...", b="b: ..."),
    op("{i} + 1", i="i: ..."),
    op("{i} * {j0}", i="i: ...", j0="i: ..."),
    op("{i} % 3", i="i: ..."),
    op("torch.div({i}, 2, rounding_mode='floor')", i="i: ..."),
    op("{x} * {i}", x="...", i="i: ..."),
    op("{i}.bitwise_and(5)", i="i: ..."),
    op("{i}.to(torch.int32).bitwise_xor(1).to(torch.int64)", i="i: ..."),
    op("{i} == 1", i="i: ..."),
    op("{i}.to({x}.dtype) + {x}", x="...", i="i: ..."),
]

REDUCE = [
    *unary("{x}.sum()", "{x}.mean()", "{x}.prod()", "{x}.amax()", "{x}.max()", "{x}.norm()", "{x}.var()"),
    *unary("{x}.sum({d})", "{x}.sum({d}, keepdim=True)", "{x}.mean({d})", "{x}.amax({d})", "{x}.amin({d})"),
    *unary("{x}.sum(({d}, {e}))", "{x}.mean(({d}, {e}), keepdim=True)", "{x}.amax(({d}, {e}))"),
    *unary("{x}.max({d}).values", "{x}.min({d}).values", "{x}.prod({d})", "{x}.logsumexp({d})"),
    *unary("{x}.argmax({d})", "{x}.argmin({d})", "{x}.argmax()", "{x}.max({d}).indices", "{x}.argmin()"),
    *unary("{x}.std({d})", "{x}.var({d}, correction=0, keepdim=True)", "torch.var_mean({x}, {d})[1]", "{x}.std()"),
    *unary("torch.linalg.vector_norm({x}, dim={d})", "torch.linalg.vector_norm({x}, 3)", "{x}.norm(p=1)"),
    *unary("({x} > 0).any({d})", "({x} > -1).all({d})", "({x} > 1).any()", "({x} > -2).all()"),
    *unary("torch.count_nonzero({x} > 0)", "torch.count_nonzero({x} > 0, {d})", "torch.aminmax({x}, dim={d})[1]"),
    op("{b}.sum({d})", b="b: ..."),
    op("{b}.any({d}, keepdim=True)", b="b: ..."),
    op("{b}.all()", b="b: ..."),
    op("{i}.sum({d})", i="i: ..."),
    op("{i}.amax({d})", i="i: ..."),
    op("{i}.prod()", i="i: ..."),
    op("torch.count_nonzero({i}, {d})", i="i: ..."),
]

MATMUL = [
    op("{x} @ {y}", x="... k", y="k n"),
    op("{x} @ {y}", x="... k", y="k"),
    op("torch.mm({x}, {y})", x="m k", y="k n"),
    op("torch.bmm({x}, {y})", x="b m k", y="b k n"),
    op("{x} @ {y}", x="b m k", y="b k n"),
    op("F.linear({x}, {w}, {b})", x="... k", w="n k", b="n"),
    op("F.linear({x}, {w})", x="... k", w="n k"),
    op("torch.addmm({c}, {x}, {y}, beta=0.5)", x="m k", y="k n", c="n"),
    op("torch.baddbmm({c}, {x}, {y}, alpha=2)", x="b m k", y="b k n", c="b m n"),
    op("torch.outer({x}, {y})", x="m", y="n"),
    op("torch.dot({x}, {y})", x="m", y="m"),
    op("torch.mv({x}, {y})", x="m k", y="k"),
    op("torch.einsum('ab,ac->bc', {x}, {y})", x="a b", y="a c"),
    op("torch.einsum('abc,cb->a', {x}, {y})", x="a b c", y="c b"),
    op("torch.einsum('ab,bc,cd->ad', {x}, {y}, {z})", x="a b", y="b c", z="c d"),
    op("torch.einsum('ab,ab,b->a', {x}, {y}, {z})", x="a b", y="a b", z="b"),
    op("torch.einsum('...a,ab->...b', {x}, {y})", x="... a", y="a b"),
    op("torch.einsum('ii->i', {x})", x="a a"),
    op("torch.tensordot({x}, {y}, 1)", x="... k", y="k n"),
    op("torch.cdist({x}, {y} + 3)", x="m k", y="n k"),
]

VIEW = [
    op("{x}.reshape({shape})", x="..."),
    op("{x}.reshape({shape})", x="..."),
    op("{x}.permute({order})", x="..."),
    *unary("{x}.transpose({d}, {e})", "{x}.movedim({d}, {e})", "{x}.flatten()", "{x}.mT", "{x}.unsqueeze({d})"),
    *unary("{x}.squeeze()", "{x}.squeeze({d})", "{x}.unsqueeze(-1).expand(*[-1] * {x}.ndim, 2)", "{x}.select({d}, -1)"),
    *unary(
        "{x}.select({d}, {j})", "{x}.narrow({d}, 0, {k})", "{x}[..., ::2]", "{x}[{j0}:]", "{x}[:, -1:]", "{x}[None]"
    ),
    *unary("{x}.chunk(2, {d})[0]", "{x}.chunk(3, {d})[-1]", "{x}.split(2, {d})[-1]", "{x}.unbind({d})[0]"),
    *unary("torch.cat({x}.tensor_split(2, {d})[::-1], {d})", "sum({x}.unbind({d}))", "{x}.flatten(0, 1)"),
    *unary("{x}.diagonal(0, {d}, {e})", "torch.diag_embed({x})", "{x}.unfold({d}, {k}, 1)", "{x}.expand_as({x})"),
    op("rearrange({x}, 'a b -> b a')", x="a b"),
    op("rearrange({x}, 'a b c -> (a b) c')", x="a b c"),
    op("rearrange({x}, 'a b c -> c (b a)')", x="a b c"),
    op("rearrange({x}, '... (h k) -> h ... k', h=2)", x="... 6"),
    op("rearrange({x}, 'b t (q h k) -> q b h t k', q=3, h=2)", x="b t 12"),
    op("rearrange({x}, '(a b) c -> a b c', a=3)", x="6 c"),
    op("{x}.expand({n[a]}, {n[b]})", x="1 b", y="a"),
]

SHAPE = [
    *unary("torch.cat([{x}, {x} * 2], {d})", "torch.stack([{x}, torch.sin({x})], {d})", "{x}.flip({d})"),
    *unary("{x}.roll({s}, {d})", "{x}.roll({s})", "{x}.repeat(*[2] * {x}.ndim)", "torch.tile({x}, (3,))"),
    *unary("F.pad({x}, (1, 2))", "F.pad({x}, (0, 0, 1, 0), value=0.5)", "F.pad({x}, (-1, 1))", "torch.tril({x})"),
    *unary("torch.triu({x}, 1)", "{x}.repeat_interleave(2, {d})", "torch.rot90({x}, 1, ({d}, {e}))", "F.glu({x}, {d})"),
    op("torch.cat([{x}, {y}])", x="a b", y="c b"),
    op("torch.cat([{x}, {y}, {x}], -1)", x="a b", y="a c"),
    op("torch.stack([{x}, {y}], {d})", x="a b", y="a b"),
    op("F.pad({x}, (1, 1), mode='reflect')", x="a b 3"),
    op("F.pad({x}, (1, 1, 0, 1), mode='replicate')", x="a b 2 3"),
    op("F.pixel_shuffle({x}, 2)", x="b 4 2 3"),
    op("F.unfold({x}, 2)", x="b c 3 4"),
]

ORDER = [
    *unary("torch.sort({x}, {d}).values", "torch.sort({x}, {d}, descending=True).indices", "torch.argsort({x}, {d})"),
    *unary("torch.topk({x}, {k}, {d}).values", "torch.topk({x}, 1, {d}).indices", "torch.msort({x})"),
    *unary("torch.cumsum({x}, {d})", "torch.cumprod({x}, {d})", "torch.cummax({x}, {d}).values"),
    *unary("torch.cummin({x}, {d}).indices", "torch.logcumsumexp({x}, {d})", "{x}.diff(dim={d})"),
    *unary("torch.median({x}, {d}).values", "torch.kthvalue({x}, {k}, {d}).values", "{x}.median()"),
    *unary("torch.median({x}, {d}).indices", "torch.kthvalue({x}, 1, {d}).indices"),
    op("torch.searchsorted(torch.sort({x}).values, {y})", x="a", y="..."),
    op("torch.cumsum({i}, {d})", i="i: ..."),
    op("torch.sort({i}, {d}, stable=True).indices", i="i: ..."),
]

INDEX = [
    op("F.embedding({i}, {w})", w="v d", i="i<v: ..."),
    op("F.embedding({i}, {w}, padding_idx=0)", w="v d", i="i<v: ..."),
    op("F.one_hot({i}, {n[v]})", w="v", i="i<v: ..."),
    op("torch.gather({x}, 0, {i})", x="v b", i="i<v: a b"),
    op("torch.gather({x}, 1, {i})", x="a v", i="i<v: a b"),
    op("torch.gather({x}, -1, {i}.unsqueeze(-1)).squeeze(-1)", x="a b v", i="i<v: a b"),
    op("torch.take_along_dim({x}, {i}, 1)", x="a v", i="i<v: a b"),
    op("torch.take_along_dim({x}, torch.argsort({x}, {d}), {d})", x="..."),
    op("torch.scatter({x}, 1, {i}, 0.5)", x="a v", i="i<v: a 1"),
    op("torch.scatter_add({x}, 0, {i}, {y})", x="v b", i="i<v: a b", y="a b"),
    op("torch.scatter_add({x}, 1, {i}, {y})", x="a v", i="i<v: a b", y="a b"),
    op("torch.scatter_reduce({x}, 0, {i}, {y}, 'amax')", x="v b", i="i<v: a b", y="a b"),
    op("torch.index_select({x}, 0, {i})", x="v b", i="i<v: n"),
    op("torch.index_select({x}, 1, {i})", x="a v", i="i<v: n"),
    op("torch.index_add({x}, 0, {i}, {y}, alpha=0.5)", x="v b", i="i<v: n", y="n b"),
    op("torch.index_add({x}, 1, {i}, {y})", x="a v", i="i<v: n", y="a n"),
    op("{x}[{i}]", x="v ...", i="i<v: ..."),
    op("{x}[:, {i}]", x="a v", i="i<v: n"),
    op("{x}[{i}, {j0}]", x="v w", i="i<v: n", j0="i<w: n"),
    op("{x}[{i}, :, {j0}]", x="v b w", i="i<v: n", j0="i<w: n"),
    op("{x}[torch.arange({n[a]}), {i}]", x="a v", i="i<v: a"),
    op("{x}.index_put(({i},), {y}, accumulate=True)", x="v b", i="i<v: n", y="n b"),
    op("{x}.index_fill(0, {i}, 0.5)", x="v b", i="i<v: n"),
    op("{x}.take({i})", x="v", i="i<v: ..."),
]

NORM = [
    *unary("torch.softmax({x}, {d})", "torch.log_softmax({x}, {d})", "F.softmin({x}, {d})"),
    *unary("F.layer_norm({x}, {x}.shape[-1:])", "F.rms_norm({x}, {x}.shape[-1:])", "F.normalize({x}, dim={d})"),
    op("F.layer_norm({x}, ({n[d]},), {w}, {b})", x="... d", w="d", b="d"),
    op("F.layer_norm({x}, ({n[c]}, {n[d]}), {w})", x="b c d", w="c d"),
    op("F.rms_norm({x}, ({n[d]},), {w})", x="... d", w="d"),
    op("F.group_norm({x}, 2, {w}, {b})", x="n 4 l", w="4", b="4"),
    op("F.group_norm({x}, 3)", x="n 6 h w"),
    op("F.batch_norm({x}, None, None, {w}, {b}, training=True)", x="6 c l", w="c", b="c"),
    op("F.batch_norm({x}, {m}, {w} * {w} + 1, {w}, {b})", x="n c", m="c", w="c", b="c"),
    op("F.batch_norm({x}, None, None, training=True)", x="4 c h w"),
    op("F.instance_norm({x})", x="n c 4"),
]

LOSS = [
    *[
        op("F.cross_entropy({x}, {t}" + options + ")", x=x, t="i<c: " + t)
        for options in ("", ", reduction='sum'", ", reduction='none'", ", label_smoothing=0.1", ", ignore_index=0")
        for x, t in (("n c", "n"), ("n c l", "n l"))
    ],
    op("F.cross_entropy({x}, {t}, {w} * {w}, ignore_index=1)", x="n c", t="i<c: n", w="c"),
    op("F.cross_entropy({x}, {t}, {w}, label_smoothing=0.2, reduction='sum')", x="n c", t="i<c: n", w="c"),
    op("F.cross_entropy({x}, {t}, {w}, reduction='none')", x="n c", t="i<c: n", w="c"),
    op("F.cross_entropy({x}, torch.softmax({y}, 1))", x="n c", y="n c"),
    op("F.nll_loss(torch.log_softmax({x}, 1), {t})", x="n c", t="i<c: n"),
    op("F.nll_loss({x}, {t}, ignore_index=0, reduction='sum')", x="n c l m", t="i<c: n l m"),
    *[
        op(f"F.{name}({{x}}, {{y}}{options})", x="...", y="...")
        for name, options in (
            ("mse_loss", ""),
            ("l1_loss", ", reduction='sum'"),
            ("smooth_l1_loss", ""),
            ("huber_loss", ", reduction='none'"),
            ("kl_div", ", reduction='sum', log_target=True"),
        )
    ],
    op("F.binary_cross_entropy_with_logits({x}, torch.sigmoid({y}))", x="a b", y="a b"),
    op("F.binary_cross_entropy(torch.sigmoid({x}), torch.sigmoid({y}))", x="a b", y="a b"),
]

CONV = [
    op("F.conv1d({x}, {w}, {b}, padding=1)", x="n c 4", w="o c 3", b="o"),
    op("F.conv1d({x}, {w}, groups=2)", x="n 4 3", w="6 2 2"),
    op("F.conv1d({x}, {w}, groups=4, padding=1)", x="n 4 3", w="4 1 2"),
    op("F.conv2d({x}, {w}, {b})", x="n c 3 4", w="o c 2 2", b="o"),
    op("F.conv2d({x}, {w}, stride=2, padding=1)", x="n c 4 4", w="o c 3 3"),
    op("F.conv_transpose1d({x}, {w}, {b})", x="n c 3", w="c o 2", b="o"),
    op("F.max_pool1d({x}, 2)", x="n c 4"),
    op("F.max_pool2d({x}, 2)", x="n c 4 4"),
    op("F.avg_pool1d({x}, 2)", x="n c 4"),
    op("F.avg_pool2d({x}, 2, stride=1)", x="n c 3 4"),
    op("F.adaptive_avg_pool2d({x}, 2)", x="n c 4 3"),
    op("F.adaptive_avg_pool1d({x}, 1)", x="n c 4"),
    op("F.adaptive_max_pool2d({x}, 2)", x="n c 4 4"),
    op("F.interpolate({x}, scale_factor=2)", x="N C 3"),
    op("F.interpolate({x}, scale_factor=2, mode='bilinear')", x="N C 2 3"),
]

ATTENTION = [
    op("F.scaled_dot_product_attention({q}, {k0}, {v0})", q="b h s d", k0="b h t d", v0="b h t d"),
    op("F.scaled_dot_product_attention({q}, {k0}, {k0}, is_causal=True)", q="b h s d", k0="b h s d"),
    op("F.scaled_dot_product_attention({q}, {q}, {q}, is_causal=True, scale=0.5)", q="b h s d"),
    op("F.scaled_dot_product_attention({q}, {k0}, {k0}, {m})", q="b h s d", k0="b h t d", m="s t"),
    op("F.scaled_dot_product_attention({q}, {k0}, {k0}, ({m} > -1))", q="b h s d", k0="b h t d", m="b 1 s t"),
    op("F.scaled_dot_product_attention({q}, {k0}, {v0}, enable_gqa=True)", q="b 4 s d", k0="b 2 s d", v0="b 2 s d"),
    op("F.scaled_dot_product_attention({q}, {k0}, {k0}, is_causal=True, enable_gqa=True)", q="b 6 s d", k0="b 3 s d"),
    op("F.scaled_dot_product_attention({q}, {k0}, {v0})", q="b s d", k0="b t d", v0="b t d"),
]

COMPLEX = [
    *unary(
        "torch.fft.fft({x}, dim={d})",
        "torch.fft.rfft({x}, dim={d})",
        "torch.fft.fft2({x})",
        "torch.view_as_complex(torch.stack([{x}, {x} * 2], -1))",
        "torch.complex({x}, {x} + 1)",
        "torch.fft.rfft({x}, dim={d}).abs()",
    ),
    *[
        op(text, c="c: ...")
        for text in (
            "{c}.real",
            "{c}.imag",
            "{c}.conj() * {c}",
            "{c}.abs()",
            "torch.view_as_real({c})",
            "{c}.sum({d})",
            "{c} * 2j",
            "torch.fft.ifft({c}, dim={d})",
            "torch.fft.irfft({c}, n=4, dim={d})",
            "{c}.mean()",
        )
    ],
    op("{c} + {x}", c="c: ...", x="..."),
    op("{c} @ {e0}", c="c: m k", e0="c: k n"),
]

FACTORY = [
    *unary("torch.zeros_like({x}) + 1", "torch.ones_like({x}) * {x}", "torch.full_like({x}, 0.5)", "{x}.new_zeros(3)"),
    op("torch.arange({n[a]}, dtype={x}.dtype) * {x}", x="... a"),
    op("torch.linspace(0, 1, {n[a]}, dtype={x}.dtype) + {x}", x="... a"),
    op("torch.eye({n[a]}, dtype={x}.dtype) @ {x}", x="a b"),
    op("torch.full(({n[a]}, 2), 0.25, dtype={x}.dtype)", x="... a"),
    op("torch.arange({n[a]})", x="... a"),
    op("vf.reshard(torch.arange({n[a]}, dtype={x}.dtype), '{spec}')", x="a"),
    op("vf.reshard(torch.linspace(0, 1, {n[a]}, dtype={x}.dtype), '{spec}') + {x}", x="a"),
    op("vf.reshard(torch.eye({n[a]}, {n[b]}, dtype={x}.dtype), '{spec}') * {x}", x="a b"),
    op("vf.reshard(torch.full(({n[a]}, {n[b]}), 0.5, dtype={x}.dtype), '{spec}') - {x}", x="a b"),
    op("torch.where(torch.ones({n[a]}, {n[b]}, dtype=torch.bool).tril(), {x}, 0.0)", x="a b"),
    op("{x}.masked_fill(torch.arange({n[b]}) > torch.arange({n[a]})[:, None], -1.0)", x="a b"),
    op("torch.zeros({n[a]}, {n[b]}, dtype={x}.dtype).index_add(0, {i}, {x})", x="a b", i="i<a: a"),
]

IN_PLACE = [
    *unary(
        "{v} = {x}.clone(); {v}.mul_(2).add_(1)",
        "{v} = {x} * 1; {v}[0] = 0.5",
        "{v} = {x}.clone(); {v}.select({d}, -1).add_(1.0)",
        "{v} = {x}.clone(); {v}.view(-1)[{j0}:].mul_(0.5)",
        "{v} = {x}.clone(); {v}.transpose({d}, {e}).tanh_()",
        "{v} = {x} + 0; {v} += {x}; {v} *= 0.5",
        "{v} = {x}.clone(); {v}.masked_fill_({x} > 0, 0.25)",
        "t = {x}.clone(); u = t.narrow({d}, 0, {k}); u.copy_(u * 2); {v} = t + t.sum()",
        "{v} = torch.zeros_like({x}); {v}[...] = {x}; {v}.clamp_(min=0)",
        "{v} = torch.empty_like({x}).copy_({x})",
        "{v} = {x}.clone(); {v}[..., 1:] = {v}[..., :-1] * 0.5",
        "t = {x}.clone(); t.diagonal(0, {d}, {e}).zero_(); {v} = t",
        "t = {x}.clone(); a, *b = t.unbind({d}); a.neg_(); {v} = t",
    ),
    op("{v} = {x}.clone(); {v}.index_add_(0, {i}, {y})", x="v b", i="i<v: n", y="n b"),
    op("{v} = {x}.clone(); {v}.scatter_(1, {i}, {y})", x="a v", i="i<v: a 1", y="a 1"),
    op("{v} = {x}.clone(); {v}[{i}] = 0.5", x="v b", i="i<v: n"),
    op("{v} = {x}.clone(); {v}[:, {j0}] = {y}", x="a b", y="a"),
]

TRANSFORM = [
    *unary(
        "torch.vmap(lambda s: torch.tanh(s) * s.sum())({x})",
        "torch.vmap(lambda s: s.softmax(-1), in_dims={d}, out_dims={d})({x})",
        "torch.func.grad(lambda s: (s * s).sum().sin())({x})",
        "torch.func.jvp(lambda s: torch.sin(s) * s.sum(), ({x},), ({x} * 2,))[1]",
        "torch.func.vjp(torch.tanh, {x})[1]({x})[0]",
        "torch.vmap(torch.func.grad(lambda s: torch.tanh(s).sum() ** 2))({x})",
        "vf.call(lambda s: torch.tanh(s) * 2, {x})",
        "vf.call(lambda s: (s * s).sum({d}, keepdim=True) * s, {x}, remat=True)",
        "vf.call(lambda s: torch.softmax(s, {d}), remat=True)({x})",
        "vf.reshard({x}, '{spec}')",
        "vf.reshard({x}, '{spec}') * 2",
        "torch.sin(vf.reshard({x}, '{spec}')) + {x}",
        "vf.call(lambda s: vf.reshard(s * s, '{spec}'), {x}, remat={bool})",
    ),
    op("vf.call(lambda a, b: torch.tanh(a @ b) @ b.T, {x}, {y}, remat={bool})", x="m k", y="k n"),
    op("torch.vmap(torch.mv, in_dims=(None, 0))({x}, {y})", x="m k", y="b k"),
    op("torch.vmap(lambda a, b: a @ b, in_dims=(0, None))({x}, {y})", x="b m k", y="k n"),
    op("torch.func.jvp(torch.mm, ({x}, {y}), ({x}, {y}))[1]", x="m k", y="k n"),
    op("torch.vmap(lambda s, j: s[j])({x}, {i})", x="a v", i="i<v: a b"),
]

SCAN = [
    op("{v}, {v}s = vf.scan(lambda c, s: (torch.tanh(c + s) * 0.9, c * s), torch.zeros_like({x}[0]), {x})", x="l ..."),
    op("{v}, {v}s = vf.scan(lambda c, s: (c * 0.5 + s, c.sum()), {x}[0], {x}, reverse=True)", x="l ..."),
    op("{v}, {v}s = vf.scan(lambda c, s: (torch.tanh(c @ {w}) + s, c.sum(0)), {x}[0] * 0, {x})", x="l b d", w="d d"),
    op("{v} = vf.scan(lambda c, w: (torch.tanh(c @ w), None), {x}, {w})[0]", x="b d", w="l d d"),
    op("{v} = vf.scan(lambda c, _: (c * 0.5 + {y}, None), {x}, length=3)[0]", x="a b", y="b"),
    op("{v}, {v}s = vf.scan(lambda c, s: (c + s @ {w}, s.sum()), torch.zeros({n[b]}, {n[n]}, dtype={x}.dtype), {x})",
       x="l b k", w="k n"),
    op("{v} = vf.scan(lambda c, s: (vf.scan(lambda a, b: (a * 0.5 + b, None), c, s)[0], c), {x}[0, 0], {x})[1]",
       x="l m ..."),
    op("{v} = vf.scan(lambda c, s: ({{'a': c['a'] + s[0], 'n': c['n'] + 1}}, s[1] * c['a']), "
       "{{'a': {y}, 'n': torch.zeros((), dtype=torch.int64)}}, ({x}, {x} * 2))[1]", x="l d", y="d"),
    op("{v} = vf.scan(vf.call(lambda c, s: (torch.tanh(c * s), s), remat=True), {x}[0], {x})[0]", x="l ..."),
]  # fmt: skip

FAMILIES: dict[str, list[Op]] = {
    "pointwise": POINTWISE,
    "reduce": REDUCE,
    "matmul": MATMUL,
    "view": VIEW,
    "shape": SHAPE,
    "order": ORDER,
    "index": INDEX,
    "norm": NORM,
    "loss": LOSS,
    "conv": CONV,
    "attention": ATTENTION,
    "complex": COMPLEX,
    "factory": FACTORY,
    "in place": IN_PLACE,
    "transform": TRANSFORM,
    "scan": SCAN,
}
