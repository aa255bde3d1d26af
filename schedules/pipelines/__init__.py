"""Pipelines: schedules as tables of actions, proved before they run.

>>> from vescale_fn.schedules.pipelines import Costs, check, schedule, simulate
>>> simulate(check(schedule("zb_h1", ranks=2, microbatches=4), memory=2)).show(60)
zb_h1: makespan 13, bubble 7.7%, peak activations 2, 2
rank 0  F0 F1 ···I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
rank 1  ···F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3
"""

from vescale_fn.schedules.pipelines.auto import Found as Found
from vescale_fn.schedules.pipelines.auto import auto as auto
from vescale_fn.schedules.pipelines.check import check as check
from vescale_fn.schedules.pipelines.check import find_fault as find_fault
from vescale_fn.schedules.pipelines.costs import Costs as Costs
from vescale_fn.schedules.pipelines.faults import Fault as Fault
from vescale_fn.schedules.pipelines.faults import ScheduleError as ScheduleError
from vescale_fn.schedules.pipelines.gantt import plot as plot
from vescale_fn.schedules.pipelines.schedule import schedule as schedule
from vescale_fn.schedules.pipelines.simulate import Timeline as Timeline
from vescale_fn.schedules.pipelines.simulate import simulate as simulate
from vescale_fn.schedules.pipelines.table import Action as Action
from vescale_fn.schedules.pipelines.table import Table as Table
from vescale_fn.schedules.pipelines.transfers import with_transfers as with_transfers
