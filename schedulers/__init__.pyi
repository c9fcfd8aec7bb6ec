# Written by tools/stubs.py.

from .masks.mask import BlockMask as BlockMask
from .model.bounds import bound as bound
from .model.machines import Machine as Machine
from .model.machines import machine as machine
from .model.selection import select as select
from .model.simulation import simulate as simulate
from .order.kinds import left_to_right as left_to_right
from .order.kinds import lpt as lpt
from .order.kinds import permutation as permutation
from .order.kinds import shift as shift
from .order.kinds import shortest_first as shortest_first
from .order.kinds import spt as spt
from .order.kinds import symmetric_shift as symmetric_shift
from .order.safety import Safety as Safety
from .order.safety import check as check
from .order.schedule import Schedule as Schedule
