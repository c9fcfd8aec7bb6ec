# Written by tools/stubs.py.

from .api import combine as combine
from .api import dispatch as dispatch
from .api import load_balance_loss as load_balance_loss
from .api import permute as permute
from .api import route as route
from .api import z_loss as z_loss
from .tensors import Dispatch as Dispatch
from .tensors import Permutation as Permutation
from .tensors import Routing as Routing
