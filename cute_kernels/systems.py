"""The systems of this build, a row each.  Nothing else lists them.

A system is a folder of this package with the files of docs/naming.md.  Its row is read when the
package is imported, and loads nothing: names become modules where they are first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING


@dataclass(frozen=True)
class System:
    """One folder.

    Attributes:
        package: The folder's name.  Importing its ``op`` registers its backends and contracts.
        ops: Public function in its ``api`` -> the entry of `dispatch` behind it.
        launcher: The module with the SM90 ``catalogue()``; None as long as there is no kernel.
        perf: The folder under ``perf/`` with its cases and rivals, and its name on that command
            line.
        namespace: Whether the package itself is public, as ``ck.<package>``, with its functions in
            it; ``ops`` then has its name alone.
    """

    package: str
    ops: Mapping[str, str]
    launcher: str | None = "launch"
    perf: str | None = None
    namespace: bool = False


SYSTEMS = (
    System("gemm", {"linear": "gemm", "matmul": "gemm", "skinny_linear": "skinny"}, perf="gemm"),
    System(
        "logp",
        {"linear_logp": "logp_states", "log_probs": "logit_states"},
        perf="logp",
    ),
    System("mhc", {"mhc": "mhc_project"}, perf="mhc", namespace=True),
    System("norm", {"rms_norm": "norm_forward", "layer_norm": "norm_forward"}, perf="norm"),
    System("sparse_attn", {"block_sparse_attention": "block_sparse_attention"}, perf="attention"),
)

#: Public name -> its module; None: it is one.
PUBLIC = {
    op: None if system.namespace else f"{system.package}.api"
    for system in SYSTEMS
    for op in system.ops
}

if TYPE_CHECKING:  # the same, for tools that read instead of running
    from . import mhc as mhc
    from .gemm.api import linear as linear
    from .gemm.api import matmul as matmul
    from .gemm.api import skinny_linear as skinny_linear
    from .logp.api import linear_logp as linear_logp
    from .logp.api import log_probs as log_probs
    from .norm.api import layer_norm as layer_norm
    from .norm.api import rms_norm as rms_norm
    from .sparse_attn.api import block_sparse_attention as block_sparse_attention
