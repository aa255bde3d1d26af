"""Modules as pure functions: values equal to the module's, ties, buffers, modes, meta modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx

import vescale_fn as vf
from vescale_fn.module import functionalize


class Rotary(nn.Module):
    """Holds a buffer that no checkpoint has."""

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 100.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inv_freq.repeat(2).cos()


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 6)
        self.rope = Rotary(6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.rope(self.wte(ids))))
        return out


class Counter(nn.Module):
    """Assigns a buffer rather than writing into it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.count


def loss_of(out: Tensor) -> Tensor:
    return (out * out).sum()


def test_values_and_gradients_are_the_modules() -> None:
    module, ids = Tied().double(), torch.tensor([1, 2, 3])
    apply, params, buffers = functionalize(module)
    grads, value = grad_and_value(lambda p: loss_of(apply(p, buffers, ids)))(params)
    expected = loss_of(module(ids))
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(value, expected.detach(), rtol=1e-14, atol=0)
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-12, atol=1e-14)


def test_tied_parameters_have_one_key() -> None:
    module = Tied()
    apply, params, buffers = functionalize(module)
    assert list(params) == ["wte.weight", "norm.weight", "norm.bias"]
    zeroed = {**params, "wte.weight": torch.zeros(10, 6)}
    assert not apply(zeroed, buffers, torch.tensor([1])).any()  # the head sees the new embedding


def test_the_module_is_left_alone() -> None:
    module = Tied()
    apply, params, buffers = functionalize(module)
    module.eval()
    with torch.no_grad():
        apply({k: v + 1 for k, v in params.items()}, buffers, torch.tensor([1]))
        assert module.head.weight is module.wte.weight
        assert params["wte.weight"].data_ptr() == module.wte.weight.data_ptr()
    assert all(p.is_meta for p in apply._module.parameters())


def test_keyword_arguments_and_structured_results() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
            return {"y": x * scale}

    apply, params, buffers = functionalize(Two())
    assert apply(params, buffers, torch.ones(2), scale=3.0)["y"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "under grad"])
def test_batch_norm_returns_its_buffers(wrap: bool) -> None:
    module, x = nn.BatchNorm1d(3).double(), torch.randn(5, 3, dtype=torch.float64)
    apply, params, buffers = functionalize(module)
    before = {k: v.clone() for k, v in buffers.items()}

    def step(params: Any, buffers: Any) -> Any:
        out, buffers = apply.stateful(params, buffers, x)
        return loss_of(out), buffers

    if wrap:
        _, (_, after) = grad_and_value(step, has_aux=True)(params, buffers)
    else:
        _, after = step(params, buffers)
    assert all(torch.equal(buffers[k], before[k]) for k in before)  # the argument is not written
    module(x)
    for name, b in module.named_buffers():
        torch.testing.assert_close(after[name], b, rtol=1e-14, atol=0)


def test_assigned_buffers_are_returned() -> None:
    apply, params, buffers = functionalize(Counter())
    out, buffers = apply.stateful(params, buffers, torch.ones(()))
    out, buffers = apply.stateful(params, buffers, torch.ones(()))
    assert (float(out), float(buffers["count"])) == (2.0, 2.0)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(3), Counter()], ids=["written", "assigned"])
@pytest.mark.parametrize("wrap", [False, True], ids=["plain", "under make_fx of grad"])
def test_plain_call_does_not_lose_buffers(module: nn.Module, wrap: bool) -> None:
    apply, params, buffers = functionalize(module)

    def loss(x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        ones = {k: torch.ones(p.shape) for k, p in params.items()}
        return loss_of(apply(ones, buffers, x))

    run = make_fx(grad_and_value(loss), tracing_mode="fake") if wrap else loss
    with pytest.raises(ValueError, match="would lose the new value"):
        run(torch.ones(2, 3), buffers)


def test_mode_is_the_modules() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9)).eval()
    apply, params, buffers = functionalize(module)
    module.train()
    x = torch.randn(5, 3)
    expected = module.eval()(x)
    torch.testing.assert_close(apply(params, buffers, x), expected.detach(), rtol=0, atol=0)


def test_meta_module() -> None:
    torch.manual_seed(0)
    real = Tied()
    with torch.device("meta"):
        module = Tied()
    apply, params, buffers = functionalize(module)
    assert all(p.is_meta for p in params.values())
    assert torch.equal(buffers["rope.inv_freq"], real.rope.inv_freq)
    loaded = {k: p.detach() for k, p in real.named_parameters()}
    ids = torch.tensor([4, 5])
    torch.testing.assert_close(apply(loaded, buffers, ids), real(ids).detach(), rtol=0, atol=0)


def test_a_meta_buffer_of_a_module_that_was_cast() -> None:
    with torch.device("meta"):
        module = Rotary(4).double()
    _, _, buffers = functionalize(module)
    torch.testing.assert_close(buffers["inv_freq"], Rotary(4).double().inv_freq, rtol=0, atol=0)


def test_meta_buffer_by_value() -> None:
    class Opaque(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(size), persistent=False)

    with torch.device("meta"):
        module = nn.ModuleDict({"a": Opaque(3)})
    with pytest.raises(ValueError) as e:
        functionalize(module)
    assert str(e.value) == (
        "functionalize: buffer a.table is on the meta device and no checkpoint holds it (persistent=False). "
        "Constructing Opaque again from its attributes failed: its constructor raised TypeError: "
        f"{Opaque.__qualname__}.__init__() missing 1 required positional argument: 'size'. "
        "Give its value: vf.functionalize(module, buffers={'a.table': tensor})."
    )
    _, _, buffers = functionalize(module, buffers={"a.table": torch.arange(3)})
    assert buffers["a.table"].tolist() == [0, 1, 2]


def test_unknown_buffer() -> None:
    with pytest.raises(ValueError) as e:
        functionalize(Rotary(4), buffers={"freq": torch.ones(2)})
    assert str(e.value) == "functionalize: Rotary has no buffer 'freq'; its buffers are inv_freq."


class Shared(nn.Module):
    """One module at two places, whose weight a third module has, too: T5's way with embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(10, 6)
        self.encoder = nn.ModuleDict({"tokens": self.shared})
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder["tokens"](ids) + self.shared(ids))
        return out


def test_a_tensor_at_many_places_leaves_nothing_behind() -> None:
    module, ids = Shared().double(), torch.arange(4)
    apply, params, _ = functionalize(module)
    assert list(params) == ["shared.weight"]
    first = apply(params, {}, ids)
    grads, value = grad_and_value(lambda p: loss_of(apply(p, {}, ids)))(params)
    expected = loss_of(module(ids))
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close((first, value), (module(ids).detach(), expected.detach()))
    torch.testing.assert_close(grads["shared.weight"], module.shared.weight.grad)
    assert {p.device.type for p in apply._module.parameters()} == {"meta"}


def test_other_names() -> None:
    apply, params, _ = functionalize(Tied())
    for wrong, what in [
        ({}, "misses norm.bias and 3 more"),
        ({**params, "rope.inv_freq": torch.ones(3), "head.weight": 0}, "has head.weight, which the module has not"),
    ]:
        with pytest.raises(ValueError) as e:
            apply(wrong, {}, torch.arange(3))
        assert str(e.value) == (
            f"apply(Tied): its params and buffers {what}. Pass those that vf.functionalize returned, or others of the "
            "same names."
        )


def test_hugging_face_llama_on_meta() -> None:
    transformers = pytest.importorskip("transformers", reason="the test extra has it")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    real = transformers.LlamaForCausalLM(config).eval()
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config).eval()
    apply, _, buffers = functionalize(module)
    params = {k: p.detach() for k, p in real.named_parameters()}
    ids = torch.arange(6)[None]
    torch.testing.assert_close(apply(params, buffers, ids).logits, real(ids).logits.detach())


def test_a_module_on_a_mesh() -> None:
    module, ids = Tied().double(), torch.arange(8).reshape(4, 2)
    apply, params, buffers = vf.functionalize(module)
    mesh = vf.make_mesh(dp=2, tp=2)
    placed = vf.device_put(params, vf.rules({"wte.weight": "v/tp d", "*": "..."}), mesh)

    @vf.pjit
    def step(params: Any, buffers: Any, ids: Tensor) -> Any:
        return grad_and_value(lambda p: loss_of(apply(p, buffers, ids)))(params)

    grads, value = step(placed, vf.device_put(buffers, "...", mesh), vf.device_put(ids, "b/dp t", mesh))
    expected = loss_of(module(ids))
    expected.backward()  # type: ignore[no-untyped-call]
    assert float(value) == pytest.approx(expected.item(), rel=1e-12)
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name].full(), p.grad, rtol=1e-10, atol=1e-12)


def test_batch_norm_on_a_mesh_has_the_statistics_of_the_whole_batch() -> None:
    module, x = nn.BatchNorm1d(3).double(), torch.randn(8, 3, dtype=torch.float64)
    apply, params, buffers = vf.functionalize(module)
    mesh = vf.make_mesh(dp=4)
    args = vf.device_put((params, buffers), "...", mesh)
    out, after = vf.pjit(apply.stateful)(*args, vf.device_put(x, "b/dp c", mesh))
    torch.testing.assert_close(out.full(), module(x).detach(), rtol=1e-12, atol=1e-12)
    for name, b in module.named_buffers():
        torch.testing.assert_close(after[name].full(), b, rtol=1e-12, atol=0)
