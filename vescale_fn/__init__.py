"""vescale_fn: write one pure training step, run it on any mesh, see every byte it sends before it runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vescale_fn.array import Array as Array
from vescale_fn.audit import AuditError as AuditError
from vescale_fn.audit import audit as audit
from vescale_fn.cast import cast as cast
from vescale_fn.debug import debug as debug
from vescale_fn.debug_print import debug_print as debug_print
from vescale_fn.lowered import Lowered as Lowered
from vescale_fn.mesh import abstract_mesh as abstract_mesh
from vescale_fn.mesh import make_mesh as make_mesh
from vescale_fn.mesh import print0 as print0
from vescale_fn.mesh import process_count as process_count
from vescale_fn.mesh import process_index as process_index
from vescale_fn.module import functionalize as functionalize
from vescale_fn.nonfinite import NonFiniteError as NonFiniteError
from vescale_fn.pjit import disable_pjit as disable_pjit
from vescale_fn.pjit import eval_shape as eval_shape
from vescale_fn.pjit import pjit as pjit
from vescale_fn.placement import device_put as device_put
from vescale_fn.placement import local_put as local_put
from vescale_fn.placement import make_array_from_callback as make_array_from_callback
from vescale_fn.placement import make_array_from_process_local_data as make_array_from_process_local_data
from vescale_fn.sharding.forms import P as P
from vescale_fn.sharding.forms import S as S
from vescale_fn.sharding.mesh import Mesh as Mesh
from vescale_fn.shardings import NamedSharding as NamedSharding
from vescale_fn.shardings import rules as rules
from vescale_fn.tracing import ShapeDtype as ShapeDtype
from vescale_fn.tracing import sharding_of as sharding_of
from vescale_fn.tree import pytree as pytree
from vescale_fn.visualize import visualize as visualize

if TYPE_CHECKING:
    from vescale_fn import optim as optim
    from vescale_fn import random as random
    from vescale_fn import schedules as schedules
    from vescale_fn.checkpoint import CheckpointError as CheckpointError
    from vescale_fn.checkpoint import Saving as Saving
    from vescale_fn.checkpoint import load as load  # type: ignore[no-redef]
    from vescale_fn.checkpoint import load_safetensors as load_safetensors
    from vescale_fn.checkpoint import save as save  # type: ignore[no-redef]
    from vescale_fn.checkpoint import save_safetensors as save_safetensors
    from vescale_fn.checkpoint import state_dict as state_dict
    from vescale_fn.primitives import named as named
    from vescale_fn.primitives import reshard as reshard
    from vescale_fn.primitives import with_sharding_constraint as with_sharding_constraint
    from vescale_fn.regions.collectives import all_gather as all_gather
    from vescale_fn.regions.collectives import all_to_all as all_to_all
    from vescale_fn.regions.collectives import axis_index as axis_index
    from vescale_fn.regions.collectives import axis_size as axis_size
    from vescale_fn.regions.collectives import pbroadcast as pbroadcast
    from vescale_fn.regions.collectives import pcast as pcast
    from vescale_fn.regions.collectives import pmax as pmax
    from vescale_fn.regions.collectives import pmean as pmean
    from vescale_fn.regions.collectives import pmin as pmin
    from vescale_fn.regions.collectives import ppermute as ppermute
    from vescale_fn.regions.collectives import psum as psum
    from vescale_fn.regions.collectives import psum_scatter as psum_scatter
    from vescale_fn.regions.collectives import ragged_all_to_all as ragged_all_to_all
    from vescale_fn.regions.einsum import einsum as einsum
    from vescale_fn.regions.shard_map import shard_map as shard_map
    from vescale_fn.regions.typeof import typeof as typeof
    from vescale_fn.register import register_rule as register_rule
    from vescale_fn.schedules import grad_and_value as grad_and_value
    from vescale_fn.schedules import weighted as weighted  # type: ignore[no-redef]
    from vescale_fn.subprogram import call as call
    from vescale_fn.subprogram import scan as scan

__version__ = "0.1.0"

# Imported when first used. At once comes what a program needs before its first step: arrays, where they live, pjit.
# Importing all would cost three times as much.
_LATER = {
    "call": "vescale_fn.subprogram",
    "named": "vescale_fn.primitives",
    "register_rule": "vescale_fn.register",
    "reshard": "vescale_fn.primitives",
    "scan": "vescale_fn.subprogram",
    "with_sharding_constraint": "vescale_fn.primitives",
    "optim": "vescale_fn.optim",
    "schedules": "vescale_fn.schedules",
    "random": "vescale_fn.random",
    "grad_and_value": "vescale_fn.schedules",
    "weighted": "vescale_fn.schedules",
    "CheckpointError": "vescale_fn.checkpoint",
    "Saving": "vescale_fn.checkpoint",
    "load": "vescale_fn.checkpoint",
    "load_safetensors": "vescale_fn.checkpoint",
    "save": "vescale_fn.checkpoint",
    "save_safetensors": "vescale_fn.checkpoint",
    "state_dict": "vescale_fn.checkpoint",
    "all_gather": "vescale_fn.regions.collectives",
    "all_to_all": "vescale_fn.regions.collectives",
    "axis_index": "vescale_fn.regions.collectives",
    "axis_size": "vescale_fn.regions.collectives",
    "pbroadcast": "vescale_fn.regions.collectives",
    "pcast": "vescale_fn.regions.collectives",
    "pmax": "vescale_fn.regions.collectives",
    "pmean": "vescale_fn.regions.collectives",
    "pmin": "vescale_fn.regions.collectives",
    "ppermute": "vescale_fn.regions.collectives",
    "psum": "vescale_fn.regions.collectives",
    "psum_scatter": "vescale_fn.regions.collectives",
    "ragged_all_to_all": "vescale_fn.regions.collectives",
    "einsum": "vescale_fn.regions.einsum",
    "typeof": "vescale_fn.regions.typeof",
    "shard_map": "vescale_fn.regions.shard_map",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'vescale_fn' has no attribute '{name}'")
    module = import_module(_LATER[name])
    value = module if _LATER[name] == f"vescale_fn.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
