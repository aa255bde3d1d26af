"""Optimizers as pairs of pure functions on pytrees, and pure transforms of them.

    opt = vf.optim.chain(vf.optim.clip_norm(1.0), vf.optim.adamw(lr=3e-4))
    state = opt.init(params)
    params, state = opt.step(grads, state, params)

`params` is any pytree of floating-point tensors. `state` is a dict: "step", the number of updates done (one 0-d
float32 tensor), and a mirror of `params` for each moment, under torch's name for it ("exp_avg", "exp_avg_sq",
"momentum_buffer"). Moments live where their parameters do. A gradient that is None leaves its parameter and moments
alone.
"""

from vescale_fn.optim.adafactor import adafactor as adafactor
from vescale_fn.optim.adam import adam as adam
from vescale_fn.optim.adam import adamw as adamw
from vescale_fn.optim.adamw8bit import adamw8bit as adamw8bit
from vescale_fn.optim.clip import clip_by_global_norm as clip_by_global_norm
from vescale_fn.optim.clip import clip_by_value as clip_by_value
from vescale_fn.optim.clip import clip_norm as clip_norm
from vescale_fn.optim.clip import clip_value as clip_value
from vescale_fn.optim.ema import ema as ema
from vescale_fn.optim.finite import loss_scale as loss_scale
from vescale_fn.optim.finite import scale_loss as scale_loss
from vescale_fn.optim.finite import skip_nonfinite as skip_nonfinite
from vescale_fn.optim.from_torch import adadelta as adadelta
from vescale_fn.optim.from_torch import adagrad as adagrad
from vescale_fn.optim.from_torch import adamax as adamax
from vescale_fn.optim.from_torch import asgd as asgd
from vescale_fn.optim.from_torch import from_torch as from_torch
from vescale_fn.optim.from_torch import nadam as nadam
from vescale_fn.optim.from_torch import radam as radam
from vescale_fn.optim.from_torch import rmsprop as rmsprop
from vescale_fn.optim.from_torch import rprop as rprop
from vescale_fn.optim.groups import groups as groups
from vescale_fn.optim.muon import muon as muon
from vescale_fn.optim.optimizer import Optimizer as Optimizer
from vescale_fn.optim.schedules import warmup_cosine as warmup_cosine
from vescale_fn.optim.schedules import warmup_linear as warmup_linear
from vescale_fn.optim.sgd import sgd as sgd
from vescale_fn.optim.transform import Transform as Transform
from vescale_fn.optim.transform import chain as chain
