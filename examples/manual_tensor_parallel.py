"""What one rank does in a parallel layer, written by hand, with every collective in sight.

The plain function is a layer with a residual branch and a mean-squared loss on one device. Below are five ways to split
it over ranks. Each is a function of what one rank holds; `shard_map` makes it a function of global values, and
torch.func differentiates it like any other. The types of the values along each axis (varying, invarying, unreduced,
reduced) put each reduction of a gradient where it belongs, forward and backward: nobody writes a backward here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

import vescale_fn as vf

AXIS = "tp"


def plain(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """up: [d, f], down: [f, d]; x, y: [sequence, d]. The loss on one device."""
    return F.mse_loss(x + F.gelu(x @ up) @ down, y, reduction="sum")


# ---- on one rank


def column_row(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Megatron's: columns of up, rows of down. One psum forward; one backward, where x, which all ranks share, meets a
    gradient that varies."""
    return F.mse_loss(x + vf.psum(F.gelu(x @ up) @ down, AXIS), y, reduction="sum")


def sequence_parallel(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Between the layers every rank holds a piece of the sequence: a gather and a scatter in place of the psum."""
    hidden = F.gelu(vf.all_gather(x, AXIS, dim=0, tiled=True) @ up)
    out = x + vf.psum_scatter(hidden @ down, AXIS, dim=0, tiled=True)
    return vf.psum(F.mse_loss(out, y, reduction="sum"), AXIS)


def data_parallel(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Every rank has all weights and some rows. Gradients are summed because the weights are the same on all ranks."""
    return vf.psum(plain(up, down, x, y), AXIS)


def fully_sharded(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Weights in pieces, whole only while they are used. "reduced" says that their gradients come as parts of a sum,
    which leave by one psum_scatter."""
    up, down = (vf.all_gather(w, AXIS, dim=0, tiled=True, to="reduced") for w in (up, down))
    return vf.psum(plain(up, down, x, y), AXIS)


def accumulated(up: Tensor, down: Tensor, x: Tensor, y: Tensor) -> tuple[Any, Tensor]:
    """Data parallel over four microbatches, with the gradient taken inside: gradients of reduced weights are unreduced,
    add up as such, and are reduced once after the loop."""
    weights = vf.pcast((up, down), AXIS, to="reduced")

    def microbatch(total: Any, rows: Any) -> Any:
        grads, value = grad_and_value(lambda w: plain(*w, *rows))(weights)
        return tuple(a + b for a, b in zip(total, (*grads, value))), None

    none = (*vf.pcast((torch.zeros_like(up), torch.zeros_like(down)), AXIS, to="unreduced"),)
    start = (*none, vf.pcast(torch.zeros((), dtype=x.dtype), AXIS, to="varying"))
    (g_up, g_down, value), _ = vf.scan(microbatch, start, tuple(t.unflatten(0, (4, -1)) for t in (x, y)))
    return vf.psum((g_up, g_down), AXIS), vf.psum(value, AXIS)


WAYS = {  # name: the function of a rank, specs of up, down, x and y
    "column, then row": (column_row, ("d f/tp", "f/tp d", "s d", "s d")),
    "sequence parallel": (sequence_parallel, ("d f/tp", "f/tp d", "s/tp d", "s/tp d")),
    "data parallel": (data_parallel, ("d f", "f d", "s/tp d", "s/tp d")),
    "fully sharded": (fully_sharded, ("d/tp f", "f/tp d", "s/tp d", "s/tp d")),
}


def step_of(name: str) -> Any:
    """The global function (up, down, x, y) -> gradients and the loss."""
    if name == "accumulated":
        specs = ("d f", "f d", "s/tp d", "s/tp d")
        return vf.shard_map(accumulated, in_specs=specs, out_specs=(("d f", "f d"), ""))
    local, specs = WAYS[name]
    return grad_and_value(vf.shard_map(local, in_specs=specs, out_specs=""), argnums=(0, 1, 2))


def main() -> None:
    mesh = vf.make_mesh(tp=4)
    draw = torch.Generator().manual_seed(0)
    shapes = ((16, 64), (64, 16), (32, 16), (32, 16))
    given = [torch.randn(s, dtype=torch.float64, generator=draw) * s[0] ** -0.5 for s in shapes]
    grads, loss = grad_and_value(plain, argnums=(0, 1, 2))(*given)
    print(f"mesh {mesh}, loss on one device {loss:.6f}")
    for name in (*WAYS, "accumulated"):
        step = vf.pjit(step_of(name), mesh=mesh)
        found, value = step(*given)
        apart = max(float((a.full() - b).abs().max()) for a, b in zip((value, *found), (loss, *grads)))
        print(f"{name}: largest difference of loss and gradients {apart:.0e}")
        for text, count in Counter(f"{c.kind} of {c.shape} {c.phase}" for c in step.lower(*given).collectives).items():
            print(f"  {count} x {text}")


if __name__ == "__main__":
    main()
