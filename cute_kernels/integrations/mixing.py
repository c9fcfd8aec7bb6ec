"""Operands of mixers with a state, as a patched trainer and an engine make them.

qkv, z, b, a = interleaved(qkvz, ba, heads, sizes)   projections of Qwen3-Next
q, k, v = delta_operands(convolved, heads, sizes)    behind the convolution and SiLU
x, B, C = scan_operands(convolved, heads, sizes)
A = rates(A_log)
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..linear_attn import op_gate
from ..linear_attn.config import L2NORM_EPS

#: (H of q and k, HV), (K, V) of a delta rule; (G of B and C, H), (N, P) of a scan.
Pair = tuple[int, int]
#: softplus(x) is x here, and a product with it exact.
_LINEAR = 32.0


class Projected(NamedTuple):
    """Projections of hidden states [B, T, hidden].

    qkv: [B, T, 2 H K + HV V], inputs of the convolution.  z: [B, T, HV, V], input of the output's
    gate.  b, a: [B, T, HV], inputs of beta and of the decay; a of Kimi's: [B, T, hidden].
    """

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


def interleaved(qkvz: torch.Tensor, ba: torch.Tensor, heads: Pair, sizes: Pair) -> Projected:
    """Qwen3-Next: each k head has its q, k, v and z side by side."""
    (k_heads, v_heads), (k, v) = heads, sizes
    group = v_heads // k_heads
    widths = [k, k, v * group, v * group]
    *qkv, z = qkvz.unflatten(-1, (k_heads, sum(widths))).split(widths, -1)
    b, a = ba.unflatten(-1, (k_heads, 2 * group)).split(group, -1)
    z = z.unflatten(-1, (group, v)).flatten(2, 3)
    return Projected(torch.cat([t.flatten(2) for t in qkv], -1), z, b.flatten(2), a.flatten(2))


def delta_operands(
    convolved: torch.Tensor, heads: Pair, sizes: Pair
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q and k [B, T, H, K], normalised, and v [B, T, HV, V] of rows [B, T, channels]."""
    (k_heads, v_heads), (k, v) = heads, sizes
    *qk, values = convolved.split([k_heads * k, k_heads * k, v_heads * v], -1)
    q, k = (op_gate.l2norm(t.unflatten(-1, (k_heads, k)), L2NORM_EPS) for t in qk)
    return q, k, values.unflatten(-1, (v_heads, v))


def scan_operands(
    convolved: torch.Tensor, heads: Pair, sizes: Pair
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [B, T, H, P], and B and C [B, T, G, N], of rows [B, T, channels]."""
    (groups, x_heads), (n, p) = heads, sizes
    x, *bc = convolved.split([x_heads * p, groups * n, groups * n], -1)
    B, C = (t.unflatten(-1, (groups, n)) for t in bc)
    return x.unflatten(-1, (x_heads, p)), B, C


def rates(A_log: torch.Tensor) -> torch.Tensor:
    """A = -e^A_log, by the op that has it: decays of a step of 1."""
    step = A_log.new_full((1, 1, A_log.numel()), _LINEAR)
    decays = op_gate.decay_gate(step, A_log.flatten(), *[None] * 5)
    return decays.view(A_log.shape) / _LINEAR
