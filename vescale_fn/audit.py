"""Do replicas still agree? Ranks that should hold the same bits compare hashes of what they hold.

A step cannot make replicas differ, but hardware can: a flipped bit in one rank's copy of a parameter trains on
unnoticed. An audit reads every replicated value once and sends 16 bytes for each part.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from vescale_fn import errors
from vescale_fn.array import Array
from vescale_fn.sharding.layout import Layout, Whole
from vescale_fn.tree import flatten_with_paths


class AuditError(RuntimeError):
    """Ranks that should hold the same value do not."""


def audit(tree: Any, what: str = "audit") -> None:
    """Compare the replicas of every Array in a pytree, bit for bit. Every process must call it.

    Raises AuditError naming the first value whose replicas differ, and the ranks that stand alone.

    >>> import torch, vescale_fn as vf
    >>> x = vf.device_put(torch.ones(2), "d", vf.make_mesh(dp=2))
    >>> vf.audit({"x": x})
    >>> x.shards[1][0] += 1
    >>> vf.audit({"x": x})
    Traceback (most recent call last):
    vescale_fn.audit.AuditError: audit: the replicas of x (f32[2] 'd' on dp=2) differ: rank 1 against rank 0...
    """
    paths, leaves, _ = flatten_with_paths(tree)
    arrays = {p: x for p, x in zip(paths, leaves) if isinstance(x, Array) and _is_replicated(x.layout)}
    digests = _everywhere({p: _digests(x) for p, x in arrays.items()}, next(iter(arrays.values()), None))
    for path, x in arrays.items():
        for replicas in x.layout.replicas():
            held = defaultdict(list)
            for rank in replicas:
                held[digests[path][rank]].append(rank)
            if len(held) > 1:
                most, *others = sorted(held.values(), key=lambda ranks: (-len(ranks), ranks))
                alone = [r for ranks in others for r in ranks]
                raise AuditError(errors.replicas_differ(what, path, x.type.text(x.spec), alone, most))


def _is_replicated(layout: Layout) -> bool:
    """Whether any axis of more than one rank holds copies."""
    return any(isinstance(s, Whole) and n > 1 for s, n in zip(layout.states, layout.mesh.sizes))


def _digests(x: Array) -> dict[int, bytes]:
    """Hash of the part that each rank of this process holds."""
    return {rank: _digest(part) for rank, part in zip(x.mesh.local_ranks, x.shards)}


def _digest(part: torch.Tensor) -> bytes:
    return hashlib.blake2b(bits(part), digest_size=16).digest()


def bits(x: torch.Tensor) -> bytes:
    """What a tensor holds, byte for byte: NaN equals itself, and 0.0 is not -0.0."""
    data: bytes = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def _everywhere(own: Mapping[str, dict[int, bytes]], example: Array | None) -> Mapping[str, Mapping[int, bytes]]:
    """The hashes of all processes."""
    if example is None or example.mesh.processes == 1:
        return own
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {path: {r: d for other in gathered for r, d in other[path].items()} for path in own}
