"""Steps that draw: pjit(f) equals f bit for bit, whatever the mesh, the layout, the engine and the transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import random_tasks as tasks
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.specs import mesh_for, spec_for
from test_export import run_exported
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worker_pool import Pool

import vescale_fn as vf
from vescale_fn.engines.virtual import VirtualEngine
from vescale_fn.mesh import make_mesh
from vescale_fn.sharding.graph import equations, op_name
from vescale_fn.sharding.mesh import Mesh

KEY = vf.random.key(11)
X = torch.linspace(-2, 2, 48).reshape(8, 6)


def assert_same(step: Callable[..., Any], *args: Any, specs: Any = None, **axes: int) -> Any:
    """pjit(step) gives what step gives, to the bit. Returns the lowered step."""
    want = tree_leaves(step(*args))
    jitted = vf.pjit(step, mesh=make_mesh(**(axes or {"dp": 2, "tp": 2})), out_shardings=specs)
    got = tree_leaves(jitted(*args))
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want)):
        assert torch.equal(a.full(), b), f"leaf {i}"
        assert a.dtype == b.dtype
    return jitted.lower(*args)


def bits_drawn(lowered: Any) -> list[list[int]]:
    """Local shape, on the first rank, of what each draw of a program makes."""
    program = lowered.program
    return [
        list(program.layouts[e.outs[0]].max_local_shape)
        for e in equations(program.graph)
        if op_name(e.op).endswith("random_bits")
    ]


# ---- draws with a key


def every_function(key: torch.Tensor, x: torch.Tensor) -> Any:
    k = vf.random.split(key, 9)
    return {
        "bits": vf.random.bits(k[0], (8, 6)),
        "uniform": vf.random.uniform(k[1], (8, 6)),
        "normal": vf.random.normal(k[2], (8, 6), torch.float64),
        "truncated": vf.random.truncated_normal(k[3], -1, 2, (8, 6)),
        "bernoulli": vf.random.bernoulli(k[4], x.sigmoid()),
        "randint": vf.random.randint(vf.random.fold_in(k[5], 3), (8, 6), -5, 5),
        "permutation": vf.random.permutation(k[6], x),
        "categorical": vf.random.categorical(k[7], x, shape=(3, 8)),
        "dropout": vf.random.dropout(k[8], x, 0.3),
        "gumbel": vf.random.gumbel(key, (4,), torch.bfloat16),
    }


def test_every_function_in_a_step() -> None:
    shared = dict.fromkeys(every_function(KEY, X), "...")
    rows = shared | dict.fromkeys(["bits", "uniform", "normal", "truncated", "bernoulli", "randint"], "a/dp b/tp")
    assert_same(every_function, KEY, X, specs=shared)
    lowered = assert_same(
        every_function, KEY, X, specs=rows | {"categorical": "n b/(dp tp)", "dropout": "a b~/(tp dp)"}
    )
    assert not lowered.collectives


@st.composite
def drawn_parts(draw: st.DrawFn) -> tuple[dict[str, int], tuple[int, ...], str]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 3, 4, 6, 12, 65]), min_size=1, max_size=3)))
    mesh = mesh_for(draw)
    return mesh, shape, spec_for(draw, shape, mesh, pending=())


@given(drawn_parts())
@settings(max_examples=15)
def test_any_mesh_and_spec(case: tuple[dict[str, int], tuple[int, ...], str]) -> None:
    mesh, shape, spec = case

    def step(key: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return vf.random.normal(key, shape) + torch.rand(shape), F.dropout(torch.ones(shape), 0.3)

    lowered = assert_same(step, KEY, specs=(spec, spec), **mesh)
    assert not lowered.collectives


@pytest.mark.parametrize(
    ("spec", "part"),
    [("a/dp b", [64, 96]), ("a (q=3 b/tp)", [128, 48]), ("a b/(dp tp)", [128, 24]), ("a b", [128, 96])],
)
def test_a_rank_draws_only_its_part(spec: str, part: list[int]) -> None:
    lowered = assert_same(lambda key: vf.random.uniform(key, (128, 96)), KEY, specs=spec)
    assert bits_drawn(lowered) == [part]
    lowered = assert_same(lambda key: vf.random.uniform(key, (129, 96)), KEY, specs="a~/(dp tp) b")
    assert bits_drawn(lowered) == [[33, 96]]


def test_keys_on_a_mesh() -> None:
    """Outside of steps too, keys may be Arrays; a batch of keys may be sharded."""
    mesh = vf.make_mesh(dp=2)
    key = vf.device_put(KEY, "_", mesh)
    assert torch.equal(vf.random.normal(key, (3,)).full(), vf.random.normal(KEY, (3,)))
    assert torch.equal(vf.random.split(key, 3).full(), vf.random.split(KEY, 3))
    assert torch.equal(vf.random.fold_in(key, 3).full(), vf.random.fold_in(KEY, 3))
    assert torch.equal(vf.random.randint(key, (3,), 0, 9).full(), vf.random.randint(KEY, (3,), 0, 9))
    keys = vf.random.split(KEY, 4)
    draw = vf.pjit(vmap(lambda k: vf.random.normal(k, (64, 64))))
    got = draw(vf.device_put(keys, "b/dp w", mesh))
    assert torch.equal(got.full(), torch.stack([vf.random.normal(k, (64, 64)) for k in keys]))
    assert bits_drawn(draw.lower(vf.device_put(keys, "b/dp w", mesh))) == [[2, 64, 64]]


# ---- draws from a scope


def every_ambient_function(key: torch.Tensor, x: torch.Tensor) -> Any:
    p = x.sigmoid()
    with vf.random.scope(key):
        return [
            F.dropout(x, 0.3),
            F.dropout(x.clone(), 0.3, inplace=True),
            F.alpha_dropout(x, 0.3, training=True),
            F.feature_alpha_dropout(x, 0.3, training=True),
            F.dropout2d(x[None, :, :, None].expand(2, 8, 6, 3).clone(), 0.5),
            F.rrelu(x, 0.1, 0.9, training=True),
            torch.rand(4, 3),
            torch.rand(4, dtype=torch.float64),
            torch.rand_like(x),
            torch.randn(4),
            torch.randn_like(x, dtype=torch.float64),
            torch.randint(7, (5,)),
            torch.randint(-7, 7, (5,), dtype=torch.int32),
            torch.randint_like(x, 3),
            torch.randint_like(x, -3, 3),
            torch.randperm(9),
            torch.bernoulli(p),
            x.bernoulli(0.2),
            torch.empty(5).bernoulli_(0.4),
            torch.empty_like(x).bernoulli_(p),
            torch.normal(x, 2.0),
            torch.normal(0.5, p),
            torch.normal(x, p),
            torch.normal(1.0, 2.0, (3,)),
            torch.empty(5).normal_(1, 2),
            torch.empty(5).uniform_(-1, 4),
            torch.empty(5).exponential_(2.0),
            torch.empty(5).geometric_(0.3),
            torch.empty(5).cauchy_(1, 2),
            torch.empty(5).log_normal_(0, 1),
            torch.empty(5, dtype=torch.int64).random_(),
            torch.empty(5).random_(),
            torch.empty(5, dtype=torch.int32).random_(4, 9),
            torch.empty(5, dtype=torch.uint8).random_(9),
            torch.empty(5, dtype=torch.bool).random_(),
            torch.multinomial(p, 3),
            torch.multinomial(p, 9, replacement=True),
            F.gumbel_softmax(x),
            torch.nn.init.kaiming_uniform_(torch.empty(3, 4)),
        ]


def test_every_ambient_function_in_a_step() -> None:
    assert_same(every_ambient_function, KEY, X)
    again, once = every_ambient_function(KEY, X), every_ambient_function(KEY, X)
    other = every_ambient_function(vf.random.key(12), X)
    assert all(map(torch.equal, again, once))
    assert not any(map(torch.equal, again, other))


N = 20_000
AMBIENT: dict[str, tuple[Callable[[], torch.Tensor], float, float]] = {  # mean and standard deviation
    "rand": (lambda: torch.rand(N), 0.5, 12**-0.5),
    "randn": (lambda: torch.randn(N), 0, 1),
    "randint": (lambda: torch.randint(-2, 3, (N,)), 0, 2**0.5),
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), 0.3, 0.21**0.5),
    "bernoulli_": (lambda: torch.empty(N).bernoulli_(0.3), 0.3, 0.21**0.5),
    "dropout": (lambda: F.dropout(torch.ones(N), 0.2), 1, 0.5),
    "native_dropout": (lambda: torch.native_dropout(torch.ones(N), 0.2, True)[0], 1, 0.5),
    "normal": (lambda: torch.normal(torch.full((N,), 3.0), 2.0), 3, 2),
    "uniform_": (lambda: torch.empty(N).uniform_(1, 3), 2, 3**-0.5),
    "exponential_": (lambda: torch.empty(N).exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda: torch.empty(N).geometric_(0.25), 4, 12**0.5),
    "log_normal_": (lambda: torch.empty(N).log_normal_(0, 0.5), 1.1331, 0.6039),
    "random_": (lambda: torch.empty(N, dtype=torch.uint8).random_(5), 2, 2**0.5),
    "random_ of all": (lambda: torch.empty(N, dtype=torch.int16).random_() / 2**15, 0.5, 12**-0.5),
    "multinomial": (lambda: torch.multinomial(torch.tensor([2.0, 6.0]), N, replacement=True), 0.75, 0.1875**0.5),
    "rrelu": (lambda: F.rrelu(-torch.ones(N), 0.2, 0.4, training=True), -0.3, 0.2 * 12**-0.5),
}


@pytest.mark.parametrize("name", AMBIENT)
def test_ambient_distributions(name: str) -> None:
    """As torch has them: means and deviations of its own draws are the expected ones, too."""
    draw, mean, deviation = AMBIENT[name]
    with vf.random.scope(KEY):
        mine = draw().double()
    torch.manual_seed(0)
    for x in (mine, draw().double()):
        assert float(x.mean()) == pytest.approx(mean, abs=4 * deviation / N**0.5)
        assert float(x.std()) == pytest.approx(deviation, rel=0.05)


def test_multinomial_without_replacement() -> None:
    with vf.random.scope(KEY):
        drawn = torch.multinomial(torch.tensor([[1.0, 2.0, 0.0, 1.0]]).expand(N, 4), 3)
    assert drawn.sort(1).values.unique(dim=0).tolist() == [[0, 1, 3]]
    assert float((drawn[:, 0] == 1).double().mean()) == pytest.approx(0.5, abs=0.015)


def test_draws_are_numbered_and_scopes_nest() -> None:
    with vf.random.scope(KEY):
        a, b = torch.rand(5), torch.rand(5)
        with vf.random.scope(KEY):
            c = torch.rand(5)
        d = torch.rand(5)
    with vf.random.scope(KEY):
        assert torch.equal(torch.rand(3), a[:3])
        torch.rand(7, 7)
        assert torch.equal(torch.rand(5), d)
    assert torch.equal(a, c)
    assert len({float(x[0]) for x in (a, b, d, vf.random.uniform(KEY, 5))}) == 4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


def test_a_module_trains_with_dropout() -> None:
    """Against autograd with the masks that the scope draws, and on a mesh."""
    torch.manual_seed(0)
    module = Block().double()
    apply, params, buffers = vf.functionalize(module)

    def step(key: torch.Tensor, params: Any, x: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return grad(lambda p: apply(p, buffers, x).square().mean())(params)

    x = X.double()
    with vf.random.scope(KEY):
        module(x).square().mean().backward()
    want = {n: p.grad for n, p in module.named_parameters()}
    mesh = vf.make_mesh(dp=2, tp=2)
    sharded = vf.device_put(
        params, vf.rules({"up.weight": "f/tp d", "up.bias": "f/tp", "down.weight": "d f/tp", "*": "..."}), mesh
    )
    got = vf.pjit(step)(KEY, sharded, vf.device_put(x, "b/dp d", mesh))
    for plain in (step(KEY, params, x), {n: v.full() for n, v in got.items()}):
        for n, expected in want.items():
            torch.testing.assert_close(plain[n], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout(causal: bool) -> None:
    q, k, v = (torch.linspace(-1, s, 2 * 4 * 6 * 8, dtype=torch.float64).sin().reshape(2, 4, 6, 8) for s in (9, 7, 5))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with vf.random.scope(KEY):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=causal)

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT / 8**0.5
        if causal:
            scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        with vf.random.scope(KEY):
            return F.dropout(scores.softmax(-1), 0.4) @ v

    def step(key: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return grad(
                lambda *a: F.scaled_dot_product_attention(*a, dropout_p=0.4, is_causal=causal).square().sum(), (0, 1, 2)
            )(q, k, v)

    torch.testing.assert_close(attend(q, k, v), by_hand(q, k, v), rtol=1e-12, atol=1e-12)
    want = grad(lambda *a: by_hand(*a).square().sum(), (0, 1, 2))(q, k, v)
    mesh = vf.make_mesh(dp=2, tp=2)
    arrays = [vf.device_put(t, "b/dp h/tp s d", mesh) for t in (q, k, v)]
    got = vf.pjit(step)(KEY, *arrays)
    assert not vf.pjit(step).lower(KEY, *arrays).collectives
    for a, b, c in zip(got, step(KEY, q, k, v), want):
        torch.testing.assert_close(a.full(), c, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(b, c, rtol=1e-12, atol=1e-12)


def test_attention_with_dropout_never_uses_a_fused_kernel() -> None:
    """Which would be chosen on a GPU, and draws by itself."""

    seen: set[str] = set()

    class Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(op_name(func) if torch.backends.cuda.flash_sdp_enabled() else "explicit")
            return func(*args, **(kwargs or {}))

    x = torch.rand(1, 2, 4, 8)
    with Probe(), vf.random.scope(KEY):
        F.scaled_dot_product_attention(x, x, x, None, 0.5)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert seen == {"explicit"}
    seen.clear()
    with vf.random.scope(KEY), Probe():
        F.scaled_dot_product_attention(x, x, x)
    assert "aten._scaled_dot_product_flash_attention_for_cpu" in seen
    assert said(lambda: _fused(x), NotImplementedError) == (
        "aten._scaled_dot_product_flash_attention drops in a kernel that has numbers of its own. Inside "
        "vf.random.scope call F.scaled_dot_product_attention, or choose the kernel that leaves dropout to torch: "
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)."
    )


def _fused(x: torch.Tensor) -> Any:
    with vf.random.scope(KEY):
        return torch.ops.aten._scaled_dot_product_flash_attention(x, x, x, 0.5)


# ---- sub-programs and transforms


def noisy(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.sin(x), 0.5) + 0.1 * torch.randn(x.shape)


@pytest.mark.parametrize("remat", [None, False, True])
def test_calls_draw_what_their_function_draws_inline(remat: bool | None) -> None:
    """The second call is another draw, what follows draws as if nothing had been called, and backward sees the masks
    of forward: the gradient is that of the function whose draws are constants."""
    part = noisy if remat is None else vf.call(noisy, remat=remat)

    def loss(key: torch.Tensor, x: torch.Tensor, part: Any) -> torch.Tensor:
        with vf.random.scope(key):
            y = F.dropout(x, 0.3)
            return (F.dropout(part(part(y)), 0.2) * y).sum()

    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        return grad(lambda x: loss(key, x, part))(x), loss(key, x, part)

    assert_same(step, KEY, X, specs=("a/dp b", ""), dp=2)
    assert torch.equal(step(KEY, X)[1], loss(KEY, X, noisy))
    leaf = X.clone().requires_grad_()
    loss(KEY, leaf, noisy).backward()
    assert leaf.grad is not None
    got = vf.pjit(step, mesh=make_mesh(dp=2))(KEY, X)[0].full()
    torch.testing.assert_close(got, leaf.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_each_iteration_of_a_scan_draws_its_own(reverse: bool) -> None:
    def loop(key: torch.Tensor, x: torch.Tensor) -> Any:
        with vf.random.scope(key):
            first = torch.rand(2)
            last, ys = vf.scan(lambda c, _: (noisy(c), torch.rand(6)), x, length=4, reverse=reverse)
            return last.sum(), (ys, first, torch.rand(2))

    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        return grad(lambda x: loop(key, x), has_aux=True)(x)

    slope, (ys, first, after) = step(KEY, X)
    assert_same(step, KEY, X)
    assert len(ys.unique()) == 24
    assert len(torch.cat([first, after]).unique()) == 4
    epsilon = 1e-3 * torch.ones_like(X)
    double = X.double()
    numeric = (loop(KEY, double + epsilon)[0] - loop(KEY, double - epsilon)[0]) / 2e-3
    assert float((slope.double()).sum()) == pytest.approx(float(numeric), rel=1e-3, abs=1e-3)


def test_nested_loops_and_calls() -> None:
    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        def inner(c: torch.Tensor, row: torch.Tensor) -> Any:
            return vf.call(noisy, c * row, remat=True), torch.rand(2)

        def outer(c: torch.Tensor, _: Any) -> Any:
            c, ys = vf.scan(inner, c, x)
            return c + torch.rand(6), ys

        with vf.random.scope(key):
            return grad(lambda c: vf.scan(outer, c, length=3)[0].sum())(x[0]), vf.scan(outer, x[0], length=3)[1]

    assert_same(step, KEY, X)
    assert len(step(KEY, X)[1].unique()) == 48


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_decides_whether_examples_differ(randomness: str) -> None:
    ones = torch.ones(4, 64)

    def parts(x: torch.Tensor, remat: bool) -> torch.Tensor:
        y = F.dropout(x, 0.5) * torch.rand(64)
        y = vf.call(lambda y: F.dropout(torch.sin(y), 0.5), y, remat=remat)
        return vf.scan(lambda c, _: (F.dropout(c, 0.1), None), y, length=2)[0]

    for remat in (False, True):

        def step(key: torch.Tensor, x: torch.Tensor, remat: bool = remat) -> Any:
            with vf.random.scope(key):
                mapped = vmap(lambda x: parts(x, remat), randomness=randomness)
                slope = grad(lambda x: mapped(x).sum())(x)
                inside = vmap(grad(lambda x: parts(x, remat).sum()), randomness=randomness)(x)
                return slope, inside

        assert_same(step, KEY, ones, specs=("b/dp d", "..."))
        for value in step(KEY, ones):
            assert len(value.unique(dim=0)) == (1 if randomness == "same" else 4)


def test_vmap_without_randomness_refuses() -> None:
    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return vmap(vf.call(noisy))(x)

    for fn in (step, vf.pjit(step, mesh=make_mesh(dp=2))):
        with pytest.raises(RuntimeError, match="vmap: called random operation while in randomness error mode"):
            fn(KEY, X)


def test_drawing_takes_part_in_forward_mode() -> None:
    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return torch.func.jvp(vf.call(noisy, remat=True), (x,), (torch.ones_like(x),))

    assert_same(step, KEY, X)


# ---- processes and files


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_draw_the_same(pool: Pool, processes: int) -> None:
    want = [x.tolist() for x in tasks.step(tasks.KEY, tasks.X)]
    assert pool.run(tasks.draw, processes=processes) == [want] * processes


def test_an_exported_step_draws_the_same(tmp_path: Path) -> None:
    jitted = vf.pjit(tasks.step, mesh=make_mesh(x=2), out_shardings=("a/x b", "...", "a b~/x", "..."))
    program = jitted.lower(tasks.KEY, tasks.X).program
    inputs = [[tasks.KEY, tasks.X]] * 2
    want = VirtualEngine(Mesh(program.mesh)).load(program)([list(i) for i in inputs])
    for got, expected in zip(run_exported(program, inputs, tmp_path), want):
        assert all(map(torch.equal, got, expected))


# ---- refusals


def line(fn: Callable[..., Any], code: str) -> str:
    """Where a function has a line of code."""
    lines, start = inspect.getsourcelines(fn)
    (offset,) = (i for i, text in enumerate(lines) if text.strip() == code)
    return f"{__file__}:{start + offset}: {code}"


def said(fn: Callable[..., Any], kind: type[Exception], *args: Any) -> str:
    with pytest.raises(kind) as caught:
        fn(*args)
    return str(caught.value)


def pjitted(fn: Callable[..., Any]) -> Any:
    return vf.pjit(fn, mesh=make_mesh(dp=2))


def test_a_scope_around_the_step_is_not_the_steps() -> None:
    def step(x: torch.Tensor) -> Any:
        return F.dropout(x, 0.5)

    with vf.random.scope(KEY):
        message = said(pjitted(step), RuntimeError, X)
    assert message.startswith("step calls the random operation aten.bernoulli_.float without a key")


def test_what_a_scope_cannot_draw() -> None:
    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return torch.poisson(x)

    def seeded(key: torch.Tensor, x: torch.Tensor) -> Any:
        with vf.random.scope(key):
            return torch.rand(3, generator=torch.Generator())

    for fn in (step, pjitted(step)):
        assert said(fn, NotImplementedError, KEY, X) == (
            "aten.poisson draws random numbers in a way that vf.random.scope does not know. Draw with a function of "
            "vf.random, or switch the layer to eval mode."
        )
    assert said(seeded, ValueError, KEY, X) == (
        "aten.rand.generator was given a generator= inside vf.random.scope, which has a key instead. Leave generator= "
        "out, or draw outside of the scope."
    )


def test_keys_that_a_scope_refuses() -> None:
    def draw(key: Any) -> Any:
        with vf.random.scope(key):
            return torch.rand(3)

    assert said(draw, TypeError, 3) == "vf.random.scope: the key is 3. Make one with vf.random.key(3)."
    assert said(vmap(draw, randomness="same"), ValueError, vf.random.split(KEY)) == (
        "vf.random.scope: the key differs between the examples of torch.vmap, and randomness= decides there whether "
        "their draws do. Open the scope outside of vmap, or draw with the key: vf.random.dropout(key, x, p)."
    )
    assert said(draw, TypeError, vf.device_put(KEY, "_", vf.make_mesh(dp=2))) == (
        "vf.random.scope: the key is an Array, Array(i64[2] '_' on dp=2; [0, 11]), and the scope is not inside a step. "
        "Open the scope in the function that vf.pjit traces, or give it key.full()."
    )


def test_a_key_that_two_lines_draw_with() -> None:
    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        a = vf.random.dropout(key, x)
        b = vf.random.normal(key, (3,))
        return a, b

    assert said(pjitted(step), vf.random.KeyReuseError, KEY, X) == (
        "step draws twice with the same key, so both draws get the same numbers:\n"
        f"  {line(step, 'a = vf.random.dropout(key, x)')}\n"
        f"  {line(step, 'b = vf.random.normal(key, (3,))')}\n"
        "Split it first: k1, k2 = vf.random.split(key). To use the same numbers twice, draw them once."
    )


def test_keys_that_are_equal_however_they_were_made() -> None:
    def split_twice(key: torch.Tensor, x: torch.Tensor) -> Any:
        a = vf.random.normal(vf.random.split(key)[0], (3,))
        b = vf.random.normal(vf.random.split(key)[0], (3,))
        return a, b

    def in_a_call(key: torch.Tensor, x: torch.Tensor) -> Any:
        a = vf.call(lambda k: vf.random.normal(k, (3,)), key)
        b = vf.random.normal(key, (3,))
        return a, b

    def in_a_loop(key: torch.Tensor, x: torch.Tensor) -> Any:
        a = vf.random.normal(key, (3,))
        return vf.scan(lambda c, _: (c + vf.random.normal(key, (3,)), None), a, length=2)

    for step in (split_twice, in_a_call, in_a_loop):
        said(pjitted(step), vf.random.KeyReuseError, KEY, X)


def test_uses_of_a_key_that_are_none_twice() -> None:
    def step(key: torch.Tensor, x: torch.Tensor) -> Any:
        """A key that is split, folded and drawn with; a function that is evaluated twice; one that is recomputed."""

        def loss(x: torch.Tensor) -> torch.Tensor:
            return vf.call(lambda x: vf.random.dropout(key, x * x), x, remat=True).sum()

        one, two = vf.random.split(vf.random.fold_in(key, 1))
        with vf.random.scope(key):
            noise = torch.rand(6) + vf.random.uniform(one, (6,))
        rows = vf.scan(lambda c, k: (c, vf.random.normal(k, (6,))), x, vf.random.split(two, 3))[1]
        return grad(loss)(x) + grad(loss)(x + 1) + noise + rows.sum(0)

    assert_same(step, KEY, X)


def test_regions_draw_by_the_key_that_a_rank_has() -> None:
    mesh = vf.make_mesh(dp=2)

    def body(key: torch.Tensor, x: torch.Tensor) -> Any:
        with vf.random.scope(vf.random.fold_in(key, vf.axis_index("dp"))):
            return F.dropout(x, 0.5), vf.random.normal(key, (3,))

    region = vf.shard_map(body, mesh=mesh, in_specs=("_", "a/dp b"), out_specs=("a/dp b", "c"))
    dropped, shared = vf.pjit(region, mesh=mesh)(KEY, X)
    for rank, part in enumerate(X.split(4)):
        with vf.random.scope(vf.random.fold_in(KEY, rank)):
            assert torch.equal(dropped.full()[4 * rank : 4 * rank + 4], F.dropout(part, 0.5))
    assert torch.equal(shared.full(), vf.random.normal(KEY, (3,)))
