"""The nearest matrix with orthonormal rows, as one operation that a rank runs on a whole matrix.

`ORTHOGONAL` is what Muon does to directions. Its steps mix all elements, so no rank can do part of it: each rank does
all of it, or the one that owns the matrix (`a~@1/dp b`), and then nothing is sent within. `KERNELS` maps it to a
function that needs only torch; `RULES` says where it may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_fn.sharding.graph import Eqn
from vescale_fn.sharding.rules.registry import Entry
from vescale_fn.sharding.rules.rule import Dims, Rule


def orthogonal(x: Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    """The nearest matrix to x with orthonormal rows (or columns, if they are fewer), roughly: a few Newton-Schulz steps
    x <- a x + (b x x' + c (x x')^2) x in `dtype`, from x of norm 1."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.to(dtype)
    y = y.mT if tall else y
    y = y / y.norm().clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y.mT if tall else y).contiguous()


def work(rows: int, columns: int, steps: int) -> float:
    """Multiplications and additions that it takes.

    >>> work(2, 3, 1)  # 12 multiplications for the gram matrix, 8 for its square, 12 for the product
    64.0
    """
    short, long = sorted((rows, columns))
    return 2.0 * steps * (2 * short * short * long + short**3)


_LIBRARY: Any = torch.library.Library("vescale_fn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("orthogonal(Tensor x, float[] coefficients, int steps, float eps, ScalarType dtype) -> Tensor")
_LIBRARY.impl("orthogonal", orthogonal, "CompositeExplicitAutograd")
ORTHOGONAL = torch.ops.vescale_fn.orthogonal.default


def _fake(x: Tensor, coefficients: Sequence[float], steps: int, eps: float, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


torch.library.register_fake("vescale_fn::orthogonal", _fake, lib=_LIBRARY)


def _whole(eqn: Eqn) -> Rule:
    """A letter of size one stands for the matrix, which an owner may hold; its rows and columns stay together."""
    rows, columns = eqn.operands[0].shape
    sizes = {"matrix": 1} | {x: n for x, n in (("row", rows), ("column", columns)) if n != 1}
    dims: Dims = (("matrix", *(["row"] * (rows != 1))), ("column",) * (columns != 1))
    return Rule((dims,), (dims,), sizes, whole=frozenset(sizes) - {"matrix"})


KERNELS: dict[Any, Callable[..., Tensor]] = {ORTHOGONAL: orthogonal}
RULES: dict[Any, Entry] = {ORTHOGONAL: _whole}
