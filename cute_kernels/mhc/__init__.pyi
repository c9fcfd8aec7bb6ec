# Written by tools/stubs.py.

from . import te as te
from .api import aggregate as aggregate
from .api import connect as connect
from .api import expand_combine as expand_combine
from .api import expand_from_embedding as expand_from_embedding
from .api import head as head
from .api import mix_and_aggregate as mix_and_aggregate
from .api import multilayer_recompute as multilayer_recompute
from .api import post_pre as post_pre
from .api import projection as projection
from .api import scale as scale
from .api import sinkhorn as sinkhorn
from .checks import Options as Options
from .converters import from_tilekernels as from_tilekernels
from .converters import from_transformer_engine as from_transformer_engine
from .converters import permute_columns as permute_columns
from .module import HyperConnection as HyperConnection
from .module import HyperHead as HyperHead
from .recompute import recompute_streams as recompute_streams
