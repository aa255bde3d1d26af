"""The way back from pure functions to a torch.nn.Module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from vescale_fn.array import Array
from vescale_fn.checkpoint import messages
from vescale_fn.checkpoint.messages import CheckpointError


def state_dict(
    module: nn.Module, params: Mapping[str, Any], buffers: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """A state dict for `module.load_state_dict` from what `functionalize(module)` gave and training changed.

    params, buffers: by the names that `functionalize` gave; Arrays become whole tensors on every process (all must call
        this). Buffers that are not given are the module's own.
    A tensor that the module holds under several names comes back under all of them; buffers that are not persistent are
    left out. Raises CheckpointError for a name that is missing or unknown.

    >>> import torch, vescale_fn as vf
    >>> layer = nn.Linear(2, 1)
    >>> apply, params, buffers = vf.functionalize(layer)
    >>> layer.load_state_dict(vf.state_dict(layer, {k: torch.zeros_like(p) for k, p in params.items()}))
    <All keys matched successfully>
    """
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    first = {id(x): name for name, x in own.items()}
    values = {**dict(module.named_buffers()), **(buffers or {}), **params}
    unknown = [name for name in values if name not in own]
    missing = [name for name in dict(module.named_parameters()) if name not in params]
    if unknown or missing:
        raise CheckpointError(messages.other_module(type(module).__name__, missing, unknown, list(own)))
    kept = module.state_dict(keep_vars=True)
    whole: dict[str, Tensor] = {}
    for name in dict.fromkeys(first[id(x)] for x in kept.values()):
        x = values[name]
        whole[name] = x.full() if isinstance(x, Array) else x.detach()
    return {name: whole[first[id(x)]] for name, x in kept.items()}
