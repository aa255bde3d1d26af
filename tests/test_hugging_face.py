"""Models of Hugging Face, unmodified and in train mode, over a mesh: losses and gradients are those on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import vescale_fn as vf

hf = pytest.importorskip("transformers", reason="the test extra has it")
F64 = torch.float64
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS: dict[str, Any] = {"vocab_size": 64, **SIZES}
GROUPED: dict[str, Any] = {**WORDS, "num_key_value_heads": 2}
PIXELS: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_labels": 5, **SIZES}
IDS = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=F64)
CLASSES = torch.tensor([0, 1, 2, 1])
NEXT: dict[str, Any] = {"input_ids": IDS, "labels": IDS, "use_cache": False}
SEEN = {"pixel_values": IMAGES, "labels": CLASSES}

# By name: the model, its arguments, and the largest difference relative to the largest gradient. Where that is not
# float64's, the model computes a part (norms, angles of rotary embeddings, a loss) in float32.
EXACT, SINGLE = 1e-12, 1e-5
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], float]] = {
    "Bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**WORDS)), {"input_ids": IDS, "labels": IDS}, EXACT),
    "GPT2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)),
        NEXT,
        SINGLE,
    ),
    "T5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        NEXT,
        EXACT,
    ),
    "Qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED)), NEXT, SINGLE),
    "Mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(sliding_window=8, **GROUPED)), NEXT, SINGLE),
    "Gemma2": (lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(head_dim=8, **GROUPED)), NEXT, SINGLE),
    "Phi3": (lambda: hf.Phi3ForCausalLM(hf.Phi3Config(pad_token_id=0, **WORDS)), NEXT, SINGLE),
    "GPTNeoX": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**WORDS)), NEXT, SINGLE),
    "ViT": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**PIXELS)), SEEN, EXACT),
    "Swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(
                image_size=32, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=5
            )
        ),
        SEEN,
        EXACT,
    ),
    "ResNet": (
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(
                embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic", num_labels=5
            )
        ),
        SEEN,
        EXACT,
    ),
    "ConvNext": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, num_labels=5)
        ),
        SEEN,
        EXACT,
    ),
}
SAMPLE = ("Bert", "T5", "Mistral", "ResNet")  # of `make test`; all of them in `make test-deep`


def tensor_parallel(name: str, p: torch.Tensor) -> str:
    """Megatron's plan where names tell, as far as sizes divide."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    if (
        p.ndim == 2
        and p.shape[0] % 2 == 0
        and last in ("q_proj", "k_proj", "v_proj", "gate_proj", "query", "wi", "fc1")
    ):
        return "o/tp i"
    return "o i/tp" if p.ndim == 2 and p.shape[1] % 2 == 0 and last in ("o_proj", "down_proj", "wo", "fc2") else "..."


def all_sharded(name: str, p: torch.Tensor) -> str:
    """Every parameter over all ranks, as far as sizes divide."""
    return "..." if p.ndim == 0 or p.shape[0] % 4 else f"o/(dp tp){' ...' * (p.ndim > 1)}"


@pytest.mark.parametrize("plan", [tensor_parallel, all_sharded])
@pytest.mark.parametrize("name", [n if n in SAMPLE else pytest.param(n, marks=pytest.mark.deep) for n in MODELS])
@pytest.mark.filterwarnings("error:.*no sharding rule")
def test_a_model_over_a_mesh(name: str, plan: Callable[[str, torch.Tensor], str]) -> None:
    torch.manual_seed(0)
    make, arguments, tolerance = MODELS[name]
    apply, params, buffers = vf.functionalize(make().double())
    constants = {k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)}
    data = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}

    def loss(params: Any, data: Any) -> torch.Tensor:
        with vf.random.scope(vf.random.key(7)):
            out, _ = apply.stateful(params, buffers, **data, **constants)
        found: torch.Tensor = out.loss
        return found

    want, value = vf.grad_and_value(loss)(params, data)
    mesh = vf.make_mesh(dp=2, tp=2)
    placed = vf.device_put(params, {n: plan(n, p) for n, p in params.items()}, mesh)
    grads, on_mesh = vf.pjit(vf.grad_and_value(loss))(placed, vf.device_put(data, "b/dp ...", mesh))
    torch.testing.assert_close(on_mesh.full(), value, rtol=max(tolerance, 1e-12), atol=0)
    largest = max(float(g.abs().max()) for g in want.values())
    for n, g in want.items():
        torch.testing.assert_close(grads[n].full(), g, rtol=0, atol=tolerance * largest, msg=lambda m, n=n: f"{n}: {m}")
