"""Random programs, meshes and specs: the space over which `pjit(f) == f` is tested."""

from programs.build import programs as programs
from programs.check import check as check
from programs.coverage import Coverage as Coverage
from programs.program import Input as Input
from programs.program import Program as Program
