"""Formulas of linear attention in float64, and how far a result may be from them."""

from __future__ import annotations

import torch
from torch.nn import functional

from cute_kernels.linear_attn import config

from .error_bounds import Near, exact


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    initial: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Causal convolution of one batch x [B, D, T], by torch's own in float64."""
    width = weight.shape[1]
    if initial is None:
        initial = x.new_zeros(*x.shape[:2], width - 1)
    rows = torch.cat([initial.double(), x.double()], 2)
    bias = None if bias is None else bias.double()
    y = functional.conv1d(rows, weight.double()[:, None], bias, groups=x.shape[1])
    return functional.silu(y) if silu else y


def conv_bound(exact: torch.Tensor, terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Error bound: one rounding to ``dtype``, and fp32 sums of at most eight ``terms``."""
    return exact.abs() * torch.finfo(dtype).eps + terms * 2.0**-20 + torch.finfo(dtype).tiny


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [T, HV, V], last state) of one sequence, q [T, Hk, K], state [HV, K, V]; float64.

    g: [T, HV], or [T, HV, K].
    """
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    served = torch.arange(v.shape[1]) // (v.shape[1] // q.shape[1])
    decays, states = (g if g.dim() == 3 else g[..., None]).exp()[..., None], []
    rows = zip(decays.unbind(), k[:, served].unbind(), v.unbind(), beta.unbind(), strict=True)
    for decay, key, value, weight in rows:
        state = decay * state
        error = value - (key[:, None] @ state)[:, 0]
        state = state + key[..., None] * (weight[:, None] * error)[:, None]
        states.append(state)
    if not states:
        return v, state
    return scale * torch.einsum("thk,thkv->thv", q[:, served], torch.stack(states)), state


def delta_bound(exact: torch.Tensor, dtype: torch.dtype, inside: float = 2.0**-22) -> torch.Tensor:
    """Error bound: one rounding to ``dtype``, and a share of the largest result.

    inside: That share; states and their gradients are fp32 between chunks on the CPU.
    """
    return exact.abs() * (torch.finfo(dtype).eps / 2) + exact.abs().max() * inside


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    state: torch.Tensor,
    options: tuple[bool, float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, H, P], last state) of one sequence, B and C [T, G, N], state [H, P, N]; float64.

    A: [H], or [H, N].  options: Whether dt goes through softplus, and its limits.
    """
    softplus, low, high = options
    if dt_bias is not None:
        dt = dt + dt_bias
    step = (functional.softplus(dt) if softplus else dt).clamp(low, high)
    group = torch.arange(x.shape[1]) // (x.shape[1] // B.shape[1])
    decays = (A.view(1, len(A), 1, -1) * step[..., None, None]).exp()
    terms, states = torch.einsum("th,thp,thn->thpn", step, x, B[:, group]), []
    for decay, term in zip(decays.unbind(), terms.unbind(), strict=True):
        state = decay * state + term
        states.append(state)
    if not states:
        return x, state
    y = torch.einsum("thpn,thn->thp", torch.stack(states), C[:, group])
    if D is not None:
        y = y + D.view(len(D), -1) * x
    return y if z is None else y * functional.silu(z), state


def l2norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(Σ x² + eps) in float64, as FLA has it."""
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + eps)


def decay(
    a: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor | None,
    lower_bound: float | None = None,
) -> torch.Tensor:
    """-e^A_log softplus(a + dt_bias) of rows [N, C] in float64, as transformers has it.

    With a bound: lower_bound sigmoid(e^A_log (a + dt_bias)).
    """
    x = a.double() if dt_bias is None else a.double() + dt_bias.double()
    rate = A_log.double().exp().repeat_interleave(a.shape[1] // len(A_log))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * functional.softplus(x)


def gated_norm(
    x: torch.Tensor, weight: torch.Tensor | None, gate: torch.Tensor, dy: torch.Tensor, rule
) -> dict[str, Near]:
    """y, dx, dgate and dweight of a gated norm of rows [M, D], with bounds of fp32 errors.

    ``rule``: a `GatedRule`.
    """
    (m, width), size = x.shape, rule.group_size
    weight = torch.ones(width) if weight is None else weight
    x, gate, dy = (exact(t.reshape(-1, size)) for t in (x, gate, dy))
    w = exact(weight.reshape(-1, size).repeat(m, 1))
    sigmoid = gate.sigmoid()
    value, slope = sigmoid, sigmoid * (-gate).sigmoid()
    if rule.activation == "silu":
        value, slope = gate * sigmoid, sigmoid + gate * slope

    def mean(t: Near) -> Near:
        return t.sum(1, chain=(size - 1).bit_length()).reshape(-1, 1) / float(size)

    first = rule.norm_before_gate
    normed = x if first else x * value
    rstd = exact(1.0, x) / (mean(normed * normed) + rule.eps).sqrt()
    hat = normed * rstd
    g = dy * w * value if first else dy * w
    of_normed = (g - hat * mean(g * hat)) * rstd
    of_weight = (dy * hat * value if first else dy * hat).reshape(m, width)
    rows = config.group_part_rows(size)
    out = {
        "y": hat * w * value if first else hat * w,
        "dx": of_normed if first else of_normed * value,
        "dgate": (dy * w * hat if first else of_normed * x) * slope,
    }
    out = {name: t.reshape(m, width) for name, t in out.items()}
    return out | {"dweight": of_weight.sum(0, chain=rows + -(-m // rows))}
