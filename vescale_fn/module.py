"""Any torch.nn.Module as a pure function and its values.

    apply, params, buffers = vf.functionalize(module)
    logits = apply(params, buffers, tokens)

`params` and `buffers` are flat dicts, keyed by torch's dotted names ("blocks.0.attn.wq.weight"), so that the globs of
`vf.rules` match them. A tensor that the module holds under several names (tied embeddings) has one key, its first
name. The module itself is left as it is: `apply` owns a copy without storage, in the mode (train or eval) that the
module had.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Tensors = dict[str, Tensor]


class Apply:
    """The forward of a module as a pure function.

    `apply(params, buffers, *args, **kwargs)` returns what the forward returns. A forward that writes its buffers
    (batch_norm in train mode) is called as `apply.stateful(params, buffers, ...)`, which also returns their new
    values; the plain call raises rather than lose them.

    >>> apply, params, buffers = functionalize(nn.BatchNorm1d(2))
    >>> y, buffers = apply.stateful(params, buffers, torch.ones(4, 2))
    >>> buffers["num_batches_tracked"]
    tensor(1)
    """

    def __init__(self, skeleton: nn.Module) -> None:
        self._module = skeleton
        self._places = _places(skeleton)

    def __call__(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        out, _, changed = self._run(params, buffers, args, kwargs)
        if changed:
            raise ValueError(
                f"The forward of {self._name} writes its buffer {changed[0]}, and apply(...) would lose the new value. "
                "Write `out, buffers = apply.stateful(params, buffers, ...)`, or functionalize the module in eval mode."
            )
        return out

    def stateful(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensors]:
        """What the forward returns, and the buffers after it."""
        out, after, _ = self._run(params, buffers, args, kwargs)
        return out, after

    def _run(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Tensors, list[str]]:
        # Writes in place hit the copies; assignment to an attribute replaces an entry of `values`.
        copies = {name: b.clone() for name, b in buffers.items()}
        versions = {name: b._version for name, b in copies.items()}
        given = {**params, **copies}
        self._check(given)
        # Not torch's own way with ties: it puts a tensor twice where modules are shared, and then cannot take it out.
        values = {place: given[name] for name, places in self._places.items() for place in places}
        out = functional_call(self._module, values, args, kwargs, tie_weights=False)
        after = {name: values[name] for name in copies}
        changed = [n for n, b in after.items() if b is not copies[n] or b._version != versions[n]]
        return out, after, changed

    def _check(self, given: Mapping[str, Tensor]) -> None:
        missing, unknown = self._places.keys() - given.keys(), given.keys() - self._places.keys()
        if missing or unknown:
            what = f"misses {_listed(missing)}" if missing else f"has {_listed(unknown)}, which the module has not"
            raise ValueError(
                f"apply({self._name}): its params and buffers {what}. Pass those that vf.functionalize returned, or "
                "others of the same names."
            )

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def __repr__(self) -> str:
        return f"apply({self._name})"


def functionalize(module: nn.Module, *, buffers: Mapping[str, Tensor] | None = None) -> tuple[Apply, Tensors, Tensors]:
    """`(apply, params, buffers)` of a module; see the module's text. The tensors share storage with the module's.

    A module built on the meta device gives meta parameters, to be replaced by real ones of the same shapes. Buffers
    that no checkpoint holds (`persistent=False`, such as rotary frequencies) are computed again, on the CPU, by
    constructing the submodule that owns them from its attributes of the names of its constructor's parameters; where
    that fails, a ValueError names the buffer. `buffers` gives values by name instead.

    >>> apply, params, _ = functionalize(nn.Linear(3, 2))
    >>> {k: tuple(v.shape) for k, v in params.items()}, apply(params, {}, torch.ones(4, 3)).shape
    ({'weight': (2, 3), 'bias': (2,)}, torch.Size([4, 2]))
    """
    params = {name: p.detach() for name, p in module.named_parameters()}
    given = dict(buffers or {})
    values = {name: given.pop(name, b).detach() for name, b in module.named_buffers()}
    if given:
        raise ValueError(
            f"functionalize: {type(module).__name__} has no buffer {next(iter(given))!r}; "
            f"its buffers are {', '.join(values) or 'none'}."
        )
    for name, owner, attribute in _temporary_buffers(module):
        if name in values and values[name].is_meta:
            values[name] = _rebuild(name, owner, attribute)
    return Apply(_without_storage(module)), params, values


def _places(module: nn.Module) -> dict[str, list[str]]:
    """The places of the module that hold a tensor, each by one name, by the tensor's first name."""
    names: dict[int, list[str]] = {}
    for path, owner in module.named_modules():
        for attribute, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                names.setdefault(id(tensor), []).append(f"{path}.{attribute}" if path else attribute)
    return {places[0]: places for places in names.values()}


def _listed(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return first + (f" and {len(rest)} more" if rest else "")


def _without_storage(module: nn.Module) -> nn.Module:
    """A copy of the module whose parameters and buffers are on the meta device, ties kept."""
    memo: dict[int, Any] = {}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(module, memo)


def _temporary_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Full name, owner and attribute of each buffer that is not part of the state dict."""
    for path, owner in module.named_modules():
        for attribute in owner._non_persistent_buffers_set:
            yield f"{path}.{attribute}" if path else attribute, owner, attribute


def _rebuild(name: str, owner: nn.Module, attribute: str) -> Tensor:
    lost = owner.get_buffer(attribute)
    try:
        with torch.device("cpu"):
            fresh = type(owner)(**_constructor_arguments(owner)).get_buffer(attribute)
    except Exception as e:
        raise ValueError(_cannot_rebuild(name, owner, f"its constructor raised {type(e).__name__}: {e}")) from e
    cast = fresh.is_floating_point() and lost.is_floating_point()  # by module.double(), say
    if fresh.shape != lost.shape or (fresh.dtype != lost.dtype and not cast):
        found = f"its constructor made {fresh.dtype} {list(fresh.shape)} instead of {lost.dtype} {list(lost.shape)}"
        raise ValueError(_cannot_rebuild(name, owner, found))
    return fresh.detach().to(lost.dtype)


def _constructor_arguments(owner: nn.Module) -> dict[str, Any]:
    """Attributes that bear the names of the constructor's parameters; the rest keep their defaults."""
    names = [p for p in inspect.signature(type(owner)).parameters if p != "device"]
    return {p: getattr(owner, p) for p in names if hasattr(owner, p)}


def _cannot_rebuild(name: str, owner: nn.Module, why: str) -> str:
    return (
        f"functionalize: buffer {name} is on the meta device and no checkpoint holds it (persistent=False). "
        f"Constructing {type(owner).__name__} again from its attributes failed: {why}. "
        f"Give its value: vf.functionalize(module, buffers={{{name!r}: tensor}})."
    )
