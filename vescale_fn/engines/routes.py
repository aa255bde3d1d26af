"""What travels in a collective, worked out before a program runs."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fn.engines.kernels import Group, cut
from vescale_fn.sharding.comm import AllGather, AllReduce, Broadcast, RaggedAllToAll
from vescale_fn.site import Site


def shapes_of(site: Site, operand: int, group: Group) -> Any:
    """What members send of one operand: its shape by member for gathers and broadcasts, the shapes of pieces by member
    and receiver otherwise, as far as they are known. Found by cutting tensors without memory."""
    if isinstance(site.comm, (AllReduce, RaggedAllToAll)):
        return ()
    layout = site.ins[operand]
    shapes = [layout.max_local_shape if layout.is_even else layout.local_shape(m) for m in group.members]
    if isinstance(site.comm, (AllGather, Broadcast)):
        return shapes
    cuts = [cut(site.comm, group, torch.empty(s, device="meta"), i) for i, s in enumerate(shapes)]
    return [[tuple(p.shape) for p in row] for row in cuts]
