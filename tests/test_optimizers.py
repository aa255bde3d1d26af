"""Optimizers that are not fused, against imperative torch.optim for 20 steps, on one device and sharded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import vescale_fn as vf
from vescale_fn import optim

Tree = dict[str, torch.Tensor]

SHAPES = {"w": (8, 12), "b": (12,), "t": (4, 2, 6)}
MATRICES = {"wide": (8, 12), "tall": (12, 8)}
STEPS = 20


def tree(seed: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Tree:
    gen = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for k, s in shapes.items()}


def imperative(make: Callable[[Any], torch.optim.Optimizer], shapes: Any, dtype: torch.dtype) -> tuple[Tree, list[Any]]:
    """Parameters after 20 steps of a torch.optim class, and the state of each."""
    params = {k: v.requires_grad_() for k, v in tree(0, shapes, dtype).items()}
    optimizer = make(params.values())
    for i in range(STEPS):
        for p, g in zip(params.values(), tree(i + 1, shapes, dtype).values()):
            p.grad = g
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}, [optimizer.state[p] for p in params.values()]


@pytest.fixture(autouse=True)
def _numbers_in_float64() -> Iterator[None]:
    """torch keeps numbers of an optimizer (eta of ASGD, products of NAdam) in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adadelta": (optim.adadelta, torch.optim.Adadelta, {"lr": 0.5}),
    "adadelta-decay": (optim.adadelta, torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1, "maximize": True}),
    "adagrad": (optim.adagrad, torch.optim.Adagrad, {"lr": 0.1}),
    "adagrad-decay": (
        optim.adagrad,
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3},
    ),
    "adamax": (optim.adamax, torch.optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
    "asgd": (optim.asgd, torch.optim.ASGD, {"lr": 0.1, "weight_decay": 0.1}),
    "asgd-averages": (optim.asgd, torch.optim.ASGD, {"lr": 0.1, "t0": 5.0, "lambd": 0.1}),
    "nadam": (optim.nadam, torch.optim.NAdam, {"lr": 0.1}),
    "nadam-decay": (optim.nadam, torch.optim.NAdam, {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.radam, torch.optim.RAdam, {"lr": 0.1, "betas": (0.8, 0.9)}),
    "radam-decay": (optim.radam, torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "rmsprop": (optim.rmsprop, torch.optim.RMSprop, {"lr": 0.1}),
    "rmsprop-centered": (
        optim.rmsprop,
        torch.optim.RMSprop,
        {"lr": 0.1, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    ),
    "rprop": (optim.rprop, torch.optim.Rprop, {"lr": 0.1}),
    "adafactor": (optim.adafactor, torch.optim.Adafactor, {"lr": 0.1}),
    "adafactor-decay": (
        optim.adafactor,
        torch.optim.Adafactor,
        {"lr": 0.5, "weight_decay": 0.1, "d": 2.0, "eps": (1e-3, 1e-2), "maximize": True},
    ),
}
PLACES = {
    "dp": ({"dp": 2}, {"w": "...", "b": "...", "t": "..."}),
    "tp": ({"tp": 2}, {"w": "a b/tp", "b": "b/tp", "t": "a b/tp c"}),
    "fsdp": ({"dp": 2}, {"w": "a/dp b", "b": "b/dp", "t": "a/dp b c"}),
    "both": ({"dp": 2, "tp": 2}, {"w": "a/dp b/tp", "b": "b/(dp tp)", "t": "a/dp b/tp c"}),
}


def race(opt: optim.Optimizer, shapes: Any, dtype: torch.dtype, step: Any = None, put: Any = None) -> tuple[Tree, Any]:
    """Parameters and state after 20 steps of a pure optimizer."""
    put = put or (lambda t: t)
    params = put(tree(0, shapes, dtype))
    state = opt.init(params)
    for i in range(STEPS):
        params, state = (step or opt.step)(put(tree(i + 1, shapes, dtype)), state, params)
    return params, state


def assert_close(ours: Tree, theirs: Tree, tolerance: float = 1e-12) -> None:
    for k, want in theirs.items():
        torch.testing.assert_close(ours[k], want, rtol=tolerance, atol=tolerance, msg=lambda m, k=k: f"{k}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_it_is_torch_in_float64(case: str) -> None:
    ours, theirs, settings = CASES[case]
    params, state = race(ours(**settings), SHAPES, torch.float64)
    expected, states = imperative(lambda ps: theirs(ps, **settings, foreach=False), SHAPES, torch.float64)
    assert_close(params, expected)
    assert float(state["step"]) == STEPS
    for moment in state.keys() - {"step"}:
        for (k, x), kept in zip(state[moment].items(), states, strict=True):
            if x is None:
                assert moment not in kept
            else:
                torch.testing.assert_close(x, kept[moment], rtol=1e-12, atol=1e-12, msg=f"{moment} of {k}")


@pytest.mark.parametrize("case", ["adadelta", "adagrad", "rprop"])
def test_where_torch_runs_the_same_code_the_bits_are_the_same(case: str) -> None:
    ours, theirs, settings = CASES[case]
    params, _ = race(ours(**settings), SHAPES, torch.float32)
    expected, _ = imperative(lambda ps: theirs(ps, **settings, foreach=False), SHAPES, torch.float32)
    assert all(torch.equal(params[k], expected[k]) for k in expected)


SHARDED = [
    "adadelta",
    "adagrad",
    "adamax",
    "asgd-averages",
    "nadam",
    "radam",
    "rmsprop-centered",
    "rprop",
    "adafactor-decay",
]
# Each algorithm in two places, the pairs being drawn; all of them with --deep.
DRAWN = {(case, place) for i, case in enumerate(SHARDED) for place in ("both", ("dp", "tp", "fsdp")[i % 3])}


@pytest.mark.parametrize(
    ("case", "place"),
    [
        pytest.param(c, p, marks=[] if (c, p) in DRAWN else [pytest.mark.deep], id=f"{c}-{p}")
        for c in SHARDED
        for p in PLACES
    ],
)
def test_sharded_it_is_what_it_is_on_one_device(case: str, place: str) -> None:
    make, theirs, settings = CASES[case]
    axes, specs = PLACES[place]
    mesh, opt = vf.make_mesh(**axes), make(**settings)
    params, state = race(
        opt, SHAPES, torch.float64, vf.pjit(opt.step, donate_argnums=(1, 2)), lambda t: vf.device_put(t, specs, mesh)
    )
    expected, _ = imperative(lambda ps: theirs(ps, **settings, foreach=False), SHAPES, torch.float64)
    assert_close({k: p.full() for k, p in params.items()}, expected, 1e-11)
    for k, p in params.items():
        assert p.layout == vf.device_put(p.full(), specs[k], mesh).layout
        for moment in state.keys() - {"step"}:
            x = state[moment][k]
            assert x is None or x.shape != p.shape or x.layout == p.layout, moment


def test_factors_of_a_second_moment_live_where_their_dims_do() -> None:
    mesh = vf.make_mesh(dp=2, tp=2)
    params = vf.device_put({"w": torch.ones(8, 12)}, {"w": "a/dp b/tp"}, mesh)
    state = optim.adafactor().init(params)
    assert {k: str(state[k]["w"].sharding.spec) for k in ("row_var", "col_var")} == {
        "row_var": "a/dp b",
        "col_var": "a b/tp",
    }
    assert state["variance"]["w"] is None


# ---- Muon


@pytest.mark.parametrize(
    "settings", [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}]
)
def test_muon_is_torch_bit_for_bit(settings: dict[str, Any]) -> None:
    params, state = race(optim.muon(lr=0.1, **settings), MATRICES, torch.float32)
    expected, states = imperative(lambda ps: torch.optim.Muon(ps, lr=0.1, **settings), MATRICES, torch.float32)
    assert all(torch.equal(params[k], expected[k]) for k in expected)
    assert all(torch.equal(x, s["momentum_buffer"]) for x, s in zip(state["momentum_buffer"].values(), states))


@pytest.mark.parametrize("spec", ["...", "a/x b", "a b/x"])
def test_muon_sharded(spec: str) -> None:
    opt, mesh = optim.muon(lr=0.1, precision=torch.float64), vf.make_mesh(x=2)
    expected, _ = race(opt, MATRICES, torch.float64)
    put = lambda t: vf.device_put(t, dict.fromkeys(MATRICES, spec), mesh)  # noqa: E731
    params, _ = race(opt, MATRICES, torch.float64, vf.pjit(opt.step), put)
    assert_close({k: p.full() for k, p in params.items()}, expected, 1e-11)


def test_muon_makes_directions_orthogonal() -> None:
    opt = optim.muon(lr=1.0, weight_decay=0.0, precision=torch.float64)
    params = {"w": torch.zeros(6, 4, dtype=torch.float64)}
    new, _ = opt.step(tree(0, {"w": (6, 4)}, torch.float64), opt.init(params), params)
    values = torch.linalg.svdvals(new["w"] / (6 / 4) ** 0.5)
    assert values.min() > 0.5
    assert values.max() < 1.3


# ---- rates, defaults, classes of one's own


@pytest.mark.parametrize("case", SHARDED)
def test_a_schedule_gives_what_its_rates_give(case: str) -> None:
    """The same optimizer with a constant schedule: numbers become tensors, traced and not."""
    make, _, settings = CASES[case]
    settings = dict(settings)
    lr = settings.pop("lr")
    scheduled = make(lr=lambda done: torch.full_like(done, lr), **settings)
    expected, _ = race(make(lr=lr, **settings), SHAPES, torch.float64)
    assert_close(race(scheduled, SHAPES, torch.float64)[0], expected)
    mesh = vf.make_mesh(dp=1)
    put = lambda t: vf.device_put(t, dict.fromkeys(SHAPES, "..."), mesh)  # noqa: E731
    params, _ = race(scheduled, SHAPES, torch.float64, vf.pjit(scheduled.step), put)
    assert_close({k: p.full() for k, p in params.items()}, expected)


@pytest.mark.parametrize(
    ("make", "theirs"),
    [*dict.fromkeys((ours, theirs) for ours, theirs, _ in CASES.values()), (optim.muon, torch.optim.Muon)],
)
def test_arguments_and_defaults_are_those_of_torch(make: Any, theirs: Any) -> None:
    ours = {k: p.default for k, p in inspect.signature(make).parameters.items()}
    for k, p in inspect.signature(theirs).parameters.items():
        if k not in ("params", "foreach", "capturable", "differentiable", "fused"):
            assert ours[k] == p.default, k


def test_every_class_of_torch_has_its_function() -> None:
    known = {
        n.lower() for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)
    }
    # These need a closure, sparse gradients, or are no algorithm.
    assert known - set(vars(optim)) == {"lbfgs", "sparseadam", "optimizer"} - set(vars(optim))


def test_a_rate_that_is_an_argument_of_the_step() -> None:
    opt = lambda lr: optim.rmsprop(lr=lr)  # noqa: E731
    params, grads, mesh = tree(0, SHAPES, torch.float64), tree(1, SHAPES, torch.float64), vf.make_mesh(dp=2)

    @vf.pjit
    def step(params: Any, state: Any, grads: Any, lr: float) -> Any:
        return opt(lr).step(grads, state, params)[0]

    placed, state = vf.device_put(params, dict.fromkeys(SHAPES, "..."), mesh), opt(0.1).init(params)
    for lr in (0.1, 0.2):
        expected, _ = opt(lr).step(grads, state, params)
        assert_close({k: p.full() for k, p in step(placed, state, grads, lr).items()}, expected)
    assert step.cache_info().misses == 1


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: optim.rmsprop(lr=-1.0), "rmsprop: lr=-1.0 must not be negative."),
        (lambda: optim.rmsprop(alpha=-1.0), "rmsprop: Invalid alpha value: -1.0"),
        (
            lambda: optim.rprop(lr=torch.tensor(0.1)),
            "rprop: the first state depends on lr, which must be a number or a schedule here.",
        ),
        (
            lambda: optim.adafactor(d=0.5),
            "adafactor: beta2_decay=-0.8 must be at most 0, and d=0.5 at least 1.",
        ),
        (
            lambda: optim.muon(adjust_lr_fn="best"),
            "muon: adjust_lr_fn='best' is not known. It must be one of None, 'original', 'match_rms_adamw'.",
        ),
        (
            lambda: optim.muon().init({"head": {"bias": torch.ones(3)}}),
            "muon: head.bias has shape [3], but muon trains matrices only. Give it to another optimizer: "
            'groups({"*.weight": muon(), "*": adamw()}).',
        ),
    ],
)
def test_messages(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as e:
        act()
    assert str(e.value) == message
