"""Element rules for FlashAttention-4's partial blocks, traced by CuTe (so no stringified types).

Each has the signature of an FA4 ``mask_mod``; indices and the result are one-element vectors.
"""

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils


@cute.jit
def document(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
    """Whether both tokens are of one document; aux_tensors: int32 ids [B, S]."""
    ids = aux_tensors[0]
    q_doc = utils.scalar_to_ssa(ids[batch[0], q_idx[0]], cutlass.Int32)
    kv_doc = utils.scalar_to_ssa(ids[batch[0], kv_idx[0]], cutlass.Int32)
    return q_doc == kv_doc


def prefix(length: int):
    """Causal, and the first ``length`` keys for all; the length is a constant of the kernel."""

    @cute.jit
    def rule(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        return (kv_idx <= q_idx) | (kv_idx < utils.scalar_to_ssa(length, cutlass.Int32))

    return rule
