"""vescale_fn: write one pure training step, run it on any mesh, see every byte it sends before it runs."""

from vescale_fn import optim as optim
from vescale_fn.array import Array as Array
from vescale_fn.audit import AuditError as AuditError
from vescale_fn.audit import audit as audit
from vescale_fn.lowered import Lowered as Lowered
from vescale_fn.mesh import abstract_mesh as abstract_mesh
from vescale_fn.mesh import make_mesh as make_mesh
from vescale_fn.mesh import print0 as print0
from vescale_fn.mesh import process_count as process_count
from vescale_fn.mesh import process_index as process_index
from vescale_fn.module import functionalize as functionalize
from vescale_fn.pjit import disable_pjit as disable_pjit
from vescale_fn.pjit import pjit as pjit
from vescale_fn.placement import device_put as device_put
from vescale_fn.placement import local_put as local_put
from vescale_fn.placement import make_array_from_callback as make_array_from_callback
from vescale_fn.placement import make_array_from_process_local_data as make_array_from_process_local_data
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
from vescale_fn.register import register_rule as register_rule
from vescale_fn.shard_map import shard_map as shard_map
from vescale_fn.sharding.forms import P as P
from vescale_fn.sharding.forms import S as S
from vescale_fn.sharding.mesh import Mesh as Mesh
from vescale_fn.shardings import NamedSharding as NamedSharding
from vescale_fn.shardings import rules as rules
from vescale_fn.subprogram import call as call
from vescale_fn.subprogram import scan as scan
from vescale_fn.trace import ShapeDtype as ShapeDtype
from vescale_fn.tree import pytree as pytree
from vescale_fn.visualize import visualize as visualize

__version__ = "0.1.0"
