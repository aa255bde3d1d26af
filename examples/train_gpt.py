"""Train a byte-level GPT on real text, on any mesh.

    python examples/train_gpt.py                                         # four virtual devices in this process
    python examples/train_gpt.py --data book.txt --mesh dp=4
    torchrun --nproc-per-node 2 examples/train_gpt.py --mesh dp=2        # two processes: the same file, the same losses
    python examples/train_gpt.py --save run1                             # and after an end of any kind:
    python examples/train_gpt.py --save run1 --resume --mesh tp=4        # goes on, here on another mesh

The model and the step are plain PyTorch on global shapes. SHARDINGS says who holds what; nothing else knows the mesh.
Without --data the text is the Python source of the running interpreter's standard library.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor
from torch.func import grad_and_value

import vescale_fn as vf

BYTES, HEAD = 256, 64  # vocabulary; size of one attention head

SHARDINGS = {
    "wte": "v/tp d",
    "*.w_qkv": "d (qkv h/tp k)",  # whole heads, of q, k and v alike
    "*.w_o": "(h/tp k) d",
    "*.up": "d f/tp",
    "*.down": "f/tp d",
    "head": "d v/tp",
    "*": "...",
}

# ---- the model


def init(layers: int, width: int, seed: int) -> dict[str, Any]:
    """Parameters of a GPT, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * rows**-0.5

    into_stream = (2 * layers) ** -0.5  # 2 * layers branches are added up
    blocks = [
        {
            "norm1": torch.ones(width),
            "w_qkv": normal(width, 3 * width),
            "w_o": normal(width, width, into_stream),
            "norm2": torch.ones(width),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width, into_stream),
        }
        for _ in range(layers)
    ]
    wte = torch.randn(BYTES, width, generator=generator)
    return {"wte": wte, "blocks": blocks, "norm": torch.ones(width), "head": normal(width, BYTES, 0.5)}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of x[b, h, t, k]."""
    t, half = x.shape[-2], x.shape[-1] // 2
    place = torch.arange(t, dtype=x.dtype, device=x.device)
    speed = 1000 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = einsum(place, speed, "t, k -> t k")
    a, b = rearrange(x, "b h t (two k) -> two b h t k", two=2)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attention(x: Tensor, w_qkv: Tensor, w_o: Tensor) -> Tensor:
    qkv = einsum(x, w_qkv, "b t d, d f -> b t f")
    q, k, v = rearrange(qkv, "b t (qkv h k) -> qkv b h t k", qkv=3, k=HEAD)
    a = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    return einsum(rearrange(a, "b h t k -> b t (h k)"), w_o, "b t f, f d -> b t d")


def gpt(params: dict[str, Any], x: Tensor) -> Tensor:
    """Logits [b, t, v] of the byte that follows each of the bytes x[b, t]."""
    h = F.embedding(x, params["wte"])
    for w in params["blocks"]:
        h = h + attention(norm(h, w["norm1"]), w["w_qkv"], w["w_o"])
        h = h + F.gelu(norm(h, w["norm2"]) @ w["up"]) @ w["down"]
    return norm(h, params["norm"]) @ params["head"]


def loss(params: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte."""
    return F.cross_entropy(rearrange(gpt(params, x), "b t v -> (b t) v"), rearrange(y, "b t -> (b t)"))


def make_train_step(opt: vf.optim.Optimizer) -> Any:
    @vf.pjit(donate_argnums=0)
    def train_step(state: dict[str, Any], batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        grads, value = grad_and_value(loss)(state["params"], *batch)
        grads, size = vf.optim.clip_by_global_norm(grads, 1.0)
        params, opt_state = opt.step(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, {"loss": value, "norm": size}

    return train_step


# ---- the text


def read_text(path: Path | None) -> Tensor:
    """All bytes of a file, or of the standard library's modules in a shuffled order."""
    if path is not None:
        text = path.read_bytes()
    else:
        files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
        files = [f for f in files if not {"test", "tests", "site-packages", "dist-packages"} & set(f.parts)]
        random.Random(0).shuffle(files)
        text = b"\n".join(f.read_bytes() for f in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(text: Tensor, batch: int, seq: int, seed: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text without end, from batch number `first` on: (bytes, the bytes that follow), both
    [batch, seq]."""
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, seq + 1, 1)
    for i in itertools.count():
        chosen = torch.randint(len(windows), (batch,), generator=generator)
        if i >= first:
            rows = windows[chosen].long()
            yield rows[:, :-1], rows[:, 1:]


def continue_text(params: dict[str, Any], prompt: bytes, length: int, seq: int, seed: int) -> str:
    """`length` bytes drawn from the model after `prompt`, by the plain function on whole parameters."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = gpt(params, text[:, -seq:])[:, -1].float()
        drawn = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
        text = torch.cat([text, drawn], 1)
    decoded = bytes(text[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in decoded)


class Checkpoints:
    """Saves the state every so many steps, beside the steps that follow."""

    def __init__(self, folder: Path | None, every: int) -> None:
        self.folder, self.every = folder, every
        self.saving: vf.Saving | None = None

    def after(self, step: int, state: Any) -> None:
        if self.folder is not None and step % self.every == 0:
            self.finish()
            self.saving = vf.save(self.folder, {"step": step, "state": state}, wait=False)

    def finish(self) -> None:
        """Wait for the last save; raises if it failed."""
        if self.saving is not None:
            self.saving.result()


# ---- what a person sees


class Progress:
    """One line that is rewritten in place on a terminal, and now and then a line elsewhere."""

    def __init__(self, title: str, first: int, steps: int, tokens: int) -> None:
        self.title, self.first, self.steps, self.tokens = title, first, steps, tokens
        self.live = sys.stdout.isatty()
        self.start = 0.0

    def show(self, step: int, value: float) -> None:
        now = time.perf_counter()
        if step == self.first + 1:
            self.start = now  # the first step also compiled the program
        rate = (step - self.first - 1) / max(now - self.start, 1e-9)
        line = f"{self.title} {step:4}/{self.steps}   loss {value:.4f}"
        if step > self.first + 1:
            minutes, seconds = divmod(round((self.steps - step) / rate), 60)
            line += f"   {rate * self.tokens:,.0f} tokens/s   {minutes}:{seconds:02} left"
        if self.live:
            vf.print0(f"\r{line[: shutil.get_terminal_size().columns - 1]}\x1b[K", end="", flush=True)
        elif step == self.first + 1 or step % max(self.steps // 15, 1) == 0 or step == self.steps:
            vf.print0(line, flush=True)

    def close(self) -> None:
        if self.live:
            vf.print0()


def describe(mesh: vf.Mesh, params: dict[str, Any], rules: Any, lowered: Any) -> None:
    """The mesh, who holds what, and what a step sends."""
    vf.print0(f"mesh {mesh}\n\n{rules.table(params, mesh)}\n\n{vf.visualize(params['blocks'][0]['w_qkv'])}\n")
    calls, sizes = Counter[Any](), Counter[Any]()
    for c in lowered.collectives:
        row = (c.kind, " ".join(c.axes), c.phase)
        calls[row] += c.count
        sizes[row] += c.total
    vf.print0("what one rank sends in a step\n  kind             axis    phase      count       MiB")
    for row, count in calls.items():
        kind, axes, phase = row
        vf.print0(f"  {kind:16} {axes:7} {phase:9} {count:6} {sizes[row] / 2**20:9.3f}")
    vf.print0()


# ---- the job


def mesh_sizes(text: str) -> dict[str, int]:
    """`dp=2,tp=2` -> sizes of both axes; an axis that is not named has size 1."""
    sizes = {"dp": 1, "tp": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.removeprefix("-").isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is not dp=N or tp=N")
        sizes[name] = int(size)
    return sizes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=mesh_sizes, default="dp=2,tp=2", help="sizes of the axes dp and tp")
    parser.add_argument("--steps", type=int, help="default 500, or 20 with --check")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help=f"a multiple of {HEAD}")
    parser.add_argument("--seq", type=int, default=128, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="a file of text")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep a checkpoint in this folder")
    parser.add_argument("--every", type=int, default=50, metavar="N", help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in the folder of --save")
    parser.add_argument("--check", action="store_true", help="train in float64 beside the plain function on one device")
    args = parser.parse_args()
    args.steps = args.steps or (20 if args.check else 500)
    if args.resume and (args.save is None or args.check):
        parser.error("--resume needs --save DIR, and does not go with --check")
    if args.width % HEAD:
        parser.error(f"--width {args.width} is not a multiple of {HEAD}, the size of an attention head")
    return args


def train(
    step: Callable[..., Any],
    state: Any,
    stream: Iterator[Any],
    args: argparse.Namespace,
    title: str,
    first: int = 0,
    checkpoints: Checkpoints | None = None,
) -> tuple[Any, list[float]]:
    """The state after the steps that follow the `first` ones, and the loss of each."""
    progress, losses = Progress(title, first, args.steps, args.batch * args.seq), []
    for i, batch in enumerate(itertools.islice(stream, args.steps - first), first + 1):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        progress.show(i, losses[-1])
        if checkpoints is not None:
            checkpoints.after(i, state)
    progress.close()
    return state, losses


def main() -> None:
    args = arguments()
    mesh = vf.make_mesh(**args.mesh)
    text = read_text(args.data)
    cut = len(text) * 19 // 20
    if len(text) - cut <= args.seq:
        raise SystemExit(f"{args.data} has {len(text)} bytes; --seq {args.seq} needs at least {20 * (args.seq + 2)}.")

    def plain_batches(part: Tensor, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(part, args.batch, args.seq, args.seed, first)

    def placed_batches(part: Tensor, first: int = 0) -> Iterator[Any]:
        return (vf.device_put(b, "b/dp t", mesh) for b in plain_batches(part, first))

    start = init(args.layers, args.width, args.seed)
    if args.check:
        start = optree.tree_map(Tensor.double, start)
    schedule = vf.optim.warmup_cosine(args.lr, args.steps // 10, args.steps, floor=args.lr / 20)
    opt = vf.optim.adamw(lr=schedule, betas=(0.9, 0.95), weight_decay=0.1)
    train_step, evaluate = make_train_step(opt), vf.pjit(loss)

    size = sum(p.numel() for p in optree.tree_leaves(start))
    vf.print0(f"{size / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text")
    rules = vf.rules(SHARDINGS, qkv=3, k=HEAD)
    params = vf.device_put(start, rules, mesh)
    state, first = {"params": params, "opt": opt.init(params)}, 0
    if args.resume:
        saved = vf.load(args.save, {"step": first, "state": state})  # as the arrays in `state` lie, whatever was saved
        state, first = saved["state"], saved["step"]
        vf.print0(f"{args.save} goes on after step {first}")
    describe(mesh, params, rules, train_step.lower(state, next(placed_batches(text))))

    checkpoints = Checkpoints(args.save, args.every)
    state, losses = train(train_step, state, placed_batches(text[:cut], first), args, "step", first, checkpoints)
    checkpoints.finish()
    scores = [float(evaluate(state["params"], *b)) for b in itertools.islice(placed_batches(text[cut:]), 8)]
    last = f"train loss {losses[-1]:.4f}   " if losses else ""
    vf.print0(f"\n{last}held-out loss {sum(scores) / len(scores):.4f}   (nats per byte)")
    whole = optree.tree_map(lambda a: a.full(), state["params"])
    if args.check:
        alone = {"params": start, "opt": opt.init(start)}
        alone, expected = train(train_step.fn, alone, plain_batches(text[:cut]), args, "one device, step")
        apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        far = max(float((a - b).abs().max()) for a, b in zip(*map(optree.tree_leaves, (whole, alone["params"]))))
        vf.print0(f"largest difference from one device: loss {apart:.1e}, parameters {far:.1e}")
    vf.print0(f"\n{continue_text(whole, b'def ', 300, args.seq, args.seed)}")


if __name__ == "__main__":
    try:
        main()
    except vf.CheckpointError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        vf.print0("\nstopped")
        sys.exit(130)
