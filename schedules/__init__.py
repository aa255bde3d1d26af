"""Schedules: transforms of losses, gradient functions and optimizers, written on the public API.

They are plain function transforms: what they make runs with and without a mesh, and gives the same result.
"""

from vescale_fn.schedules.accumulate import accumulate as accumulate
from vescale_fn.schedules.gradient import grad_and_value as grad_and_value
from vescale_fn.schedules.offload import offload as offload
from vescale_fn.schedules.packing import Packing as Packing
from vescale_fn.schedules.packing import pack as pack
from vescale_fn.schedules.pipeline import pipeline as pipeline
from vescale_fn.schedules.precision import mixed_precision as mixed_precision
from vescale_fn.schedules.remat import budget as budget
from vescale_fn.schedules.remat import names as names
from vescale_fn.schedules.remat import remat as remat
from vescale_fn.schedules.sequential import sequential as sequential
from vescale_fn.schedules.split import cuts as cuts
from vescale_fn.schedules.split import split as split
from vescale_fn.schedules.weighted import weighted as weighted
from vescale_fn.schedules.zero import Held as Held
from vescale_fn.schedules.zero import Zero as Zero
from vescale_fn.schedules.zero import zero as zero
