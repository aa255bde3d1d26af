"""Adam and AdamW."""

from __future__ import annotations

from vescale_fn.optim import checks
from vescale_fn.optim.list_update import ListUpdate
from vescale_fn.optim.masks import Mask
from vescale_fn.optim.optimizer import Optimizer
from vescale_fn.optim.schedules import Rate, rate_text


def adamw(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """AdamW: Adam with decoupled weight decay. Arguments as torch.optim.AdamW. A step is one operation for all
    parameters of a dtype, and gives bit for bit what torch gives with `fused=True`.

    lr: may be a function of the number of updates done (see `warmup_cosine`).
    decay: which parameters have weight decay: globs of their paths, or a function of path and parameter; all by
        default.
    Raises ValueError for settings out of range. Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.

    >>> adamw(lr=3e-4, decay=lambda path, param: param.ndim > 1)
    adamw(lr=0.0003, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)
    """
    return _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize, decay)


def adam(
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    amsgrad: bool = False,
    maximize: bool = False,
    decay: Mask = None,
) -> Optimizer:
    """Adam; weight decay is added to the gradient. Arguments as torch.optim.Adam and `adamw`.

    Kingma and Ba, https://arxiv.org/abs/1412.6980.
    """
    return _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize, decay)


def _adam(
    name: str,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
    decay: Mask,
) -> Optimizer:
    checks.settings(name, lr=lr, eps=eps, weight_decay=weight_decay)
    if not all(0 <= b < 1 for b in betas):
        raise ValueError(f"{name}: betas={betas} must both lie in [0, 1).")
    settings = {
        "decoupled": name == "adamw",
        "beta1": float(betas[0]),
        "beta2": float(betas[1]),
        "eps": float(eps),
        "weight_decay": float(weight_decay),
        "amsgrad": amsgrad,
        "maximize": maximize,
    }
    text = f"{name}(lr={rate_text(lr)}, betas={betas}, eps={eps}, weight_decay={weight_decay})"
    lists = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq" if amsgrad else None)
    return ListUpdate("adam", lists, settings).optimizer(text, lr, decay)
