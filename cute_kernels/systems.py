"""The systems of this build, a row each.  Nothing else lists them.

A system is a folder of this package with the files of docs/naming.md.  Its row is read when the
package is imported, and loads nothing: names become modules where they are first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One system: a package of ops with its backends, kernels and benches.

    Attributes:
        package: The folder's name.  Importing its ``op`` registers its backends and contracts.
        ops: Public function in its ``api`` -> the entry of `dispatch` behind it.
        launcher: The module with the SM90 ``catalogue()``; None as long as there is no kernel.
        perf: The folder under ``perf/`` with its cases and rivals, and its name on that command
            line.
        namespace: Whether the package itself is public, as ``ck.<package>``, with its functions in
            it; ``ops`` then has its name for all of them.
        modules: The modules that define torch ops.
    """

    package: str
    ops: Mapping[str, str]
    launcher: str | None = "launch"
    perf: str | None = None
    namespace: bool = False
    modules: tuple[str, ...] = ("op",)


SYSTEMS = (
    System("gemm", {"linear": "gemm", "matmul": "gemm", "skinny_linear": "skinny"}, perf="gemm"),
    System(
        "linear_attn",
        {
            **dict.fromkeys(("causal_conv1d_fn", "causal_conv1d_update"), "causal_conv"),
            **dict.fromkeys(
                ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), "gated_delta_rule"
            ),
            **dict.fromkeys(("chunk_kda", "fused_recurrent_kda"), "kda"),
            "mamba_chunk_scan_combined": "ssd_scan",
            "selective_scan": "selective_scan",
            "gated_rms_norm": "gated_norm",
        },
        perf="linear_attn",
        modules=("op_conv", "op_delta", "op_gate", "op_ssd", "op_selective", "op_gated_norm"),
    ),
    System(
        "logp",
        {
            "linear_logp": "logp_states",
            "log_probs": "logit_states",
            "linear_policy_loss": "logp_states",
        },
        perf="logp",
        modules=("op", "policy_op"),
    ),
    System("mhc", {"mhc": "mhc_project"}, perf="mhc", namespace=True),
    System(
        "moe",
        {"grouped_linear": "grouped_gemm", "moe": "moe_select"},
        perf="moe",
        namespace=True,
        modules=("op", "routing_op"),
    ),
    System("norm", {"rms_norm": "norm_forward", "layer_norm": "norm_forward"}, perf="norm"),
    System(
        "rowwise",
        {
            name: name
            for name in (
                "embedding",
                "softmax",
                "log_softmax",
                "silu",
                "gelu",
                "sigmoid",
                "tanh",
                "silu_mul",
                "gelu_mul",
                "rotary_table",
                "apply_rotary",
                "apply_rotary_pos_emb",
                "clip_grad_norm_",
            )
        },
        launcher=None,
    ),
    System(
        "sparse_attn",
        {
            "block_sparse_attention": "block_sparse_attention",
            "block_sparse_attention_varlen": "block_sparse_attention",
            "paged_attention": "paged_attention",
            "write_kv_cache": "write_kv_cache",
        },
        perf="attention",
        modules=("op", "paged.op"),
    ),
)


def load() -> None:
    """Import the ops of every system, which registers their backends and contracts."""
    for system in SYSTEMS:
        for module in system.modules:
            importlib.import_module(f"{__package__}.{system.package}.{module}")


#: Public name -> its module; None: it is one.
PUBLIC = {
    op: None if system.namespace and op == system.package else f"{system.package}.api"
    for system in SYSTEMS
    for op in system.ops
}
