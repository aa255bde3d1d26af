"""What a value is, as text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vescale_fn.regions.marks import states_of
from vescale_fn.regions.states import states_text
from vescale_fn.sharding.graph import dtype_text


def typeof(x: Any) -> str:
    """Dtype, shape, and in a region the states along its axes: `f32[4, 3] {V: dp}`. What is invarying is left out.

    >>> import torch, vescale_fn as vf
    >>> mesh = vf.make_mesh(dp=2)
    >>> show = vf.shard_map(lambda x: print(vf.typeof(x)) or x, mesh=mesh, in_specs="b/dp", out_specs="b/dp")
    >>> _ = show(torch.ones(4))
    f32[2] {V: dp}
    >>> typeof(torch.ones(4))
    'f32[4]'
    """
    if not isinstance(x, Tensor) and not hasattr(x, "shape"):
        return type(x).__name__
    states = states_text(states_of(x) or {})
    return f"{dtype_text(x.dtype)}{list(x.shape)}" + (f" {states}" if states else "")
