"""Oracles for tests, never dispatched: linear_logp in float64, its gradients, its error bounds."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from cute_kernels.logp.config import LN2
from cute_kernels.schedulers.tiles import leaves

#: Relative error of a probability that is right but for exp2 (reliability.md section 5), the four
#: additions of a unit, its rounding to 2^-24 of 2^M, and the units that are left out.
_OF_SUM = 2.0**-22 + 4 * 2.0**-24 + 2.0**-24 + 2.0**-34
#: Relative error of 2^y y: y and the product are rounded, and moved to the bin, up to 16.5 away.
_OF_WEIGHTED = _OF_SUM + 3 * 2.0**-24
#: Factor for the second order terms of the bounds below.
_SLACK = 1 + 2.0**-7


class Options(NamedTuple):
    """Options of a call, besides its tensors."""

    temperature: float | torch.Tensor = 1.0
    softcap: float = 0.0
    ignore_index: int = -100
    vocab_size: int | None = None
    order: str = "chain"


class Bounds(NamedTuple):
    """Largest allowed error of each result, fp64."""

    logp: torch.Tensor
    entropy: torch.Tensor
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


def logits(hidden, weight, bias=None, options: Options = Options()) -> torch.Tensor:
    """Compute z / τ in float64: [T, entries of the vocabulary]."""
    entries = options.vocab_size or len(weight)
    z = hidden.double() @ weight[:entries].double().mT
    z = z if bias is None else z + bias[:entries].double()
    z = options.softcap * torch.tanh(z / options.softcap) if options.softcap else z
    return z / _column(options.temperature)


def of_logits(y: torch.Tensor, target: torch.Tensor, ignore_index: int = -100):
    """Return (log p, entropy) of logits [T, V] that have been divided by τ; 0 where masked."""
    masked = target == ignore_index
    log_p = torch.log_softmax(y.double(), 1)
    chosen = log_p.gather(1, torch.where(masked, 0, target)[:, None])[:, 0]
    # 0 ln 0 is 0.
    entropy = -(log_p.exp() * log_p.clamp(min=-1e300)).sum(1)
    return torch.where(masked, 0.0, chosen), torch.where(masked, 0.0, entropy)


def linear_logp(hidden, weight, target, bias=None, options: Options = Options()):
    """Return (log p, entropy) of hidden [T, D] and weight [V, D] in float64, differentiable."""
    return of_logits(logits(hidden, weight, bias, options), target, options.ignore_index)


def gradient_of_logits(z, target, d_logp, d_entropy, options: Options = Options()):
    """Return dlogits [T, V] in closed form, of logits z before softcap and temperature."""
    tau, slope = _column(options.temperature), 1.0
    if options.softcap:
        z = options.softcap * torch.tanh(z / options.softcap)
        slope = 1 - (z / options.softcap).square()
    log_p = torch.log_softmax(z / tau, 1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1, keepdim=True)
    counted = (target != options.ignore_index)[:, None]
    one_hot = torch.zeros_like(p).scatter(1, torch.where(counted, target[:, None], 0), 1.0)
    gradient = (one_hot - p) * d_logp.double()[:, None]
    gradient = gradient - p * (log_p + entropy) * d_entropy.double()[:, None]
    return torch.where(counted, gradient * slope / tau, 0.0)


def gradients(tensors, target, upstream, options: Options = Options()):
    """Return (dhidden, dweight, dbias) in float64, in closed form; padding of the vocabulary has 0.

    Args:
        tensors: hidden [T, D], weight [V, D] and bias [V] or None.
        upstream: d_logp and d_entropy, [T] each.
    """
    hidden, weight, bias = tensors
    entries = options.vocab_size or len(weight)
    rows = torch.where((target != options.ignore_index)[:, None], hidden, 0.0).double()
    weight64 = weight[:entries].double()
    z = rows @ weight64.mT
    z = z if bias is None else z + bias[:entries].double()
    d_logits = gradient_of_logits(z, target, *upstream, options)
    d_bias = weight.new_zeros(len(weight), dtype=torch.float64)
    d_weight = weight.new_zeros(weight.shape, dtype=torch.float64)
    d_weight[:entries], d_bias[:entries] = d_logits.mT @ rows, d_logits.sum(0)
    return d_logits @ weight64, d_weight, d_bias


def error_bounds(tensors, target, upstream, options: Options = Options()) -> Bounds:
    """Error bounds of a correct kernel of any backend, before the last rounding of a gradient.

    A logit is wrong by T = 5.25 ⌈D/16⌉ 2⁻²³ Σ|h w| (a Hopper chain: reliability.md section 5; for
    ``tree`` of a leaf, and 2⁻²⁴ for each leaf added), by a rounding where a bias is added, and by
    2⁻²¹ softcap.  y = z log2(e) / τ adds 2⁻²⁴ |y| for the scale and 2⁻²⁴ |y - M| for the fma.  From
    there on log p = y_t - log Σ e^y, with ε the relative error of the sum:

        |Δ log p| <= Δy_t + log Σ p e^Δy + ε + ½ulp        |ΔH| <= Σ p |ln p + H| Δy + ...

    The arguments are those of `gradients`.
    """
    hidden, weight, bias = tensors
    d_logp, d_entropy = (t.double()[:, None] for t in upstream)
    entries = options.vocab_size or len(weight)
    tau = _column(options.temperature)
    counted = (target != options.ignore_index)[:, None]
    # A masked token has no error.
    rows, head = torch.where(counted, hidden, 0.0).double(), weight[:entries].double()
    z = rows @ head.mT
    of_z = _chain(options.order, weight.shape[1]) * (rows.abs() @ head.abs().mT)
    if bias is not None:
        z = z + bias[:entries].double()
        of_z = of_z + 2.0**-24 * (z.abs() + of_z)
    slope, of_slope = 1.0, 0.0
    if options.softcap:
        capped = options.softcap * torch.tanh(z / options.softcap)
        slope = 1 - (capped / options.softcap).square()
        of_slope = 2 * of_z / options.softcap + 2.0**-20
        of_z = of_z + 2.0**-21 * options.softcap
        z = capped
    y = z / tau
    of_y = of_z / tau + 2.0**-24 * y.abs() + 2.0**-24 * (y.amax(1, keepdim=True) - y + LN2)
    log_p = torch.log_softmax(y, 1)
    p = log_p.exp()
    h = -(p * log_p).sum(1, keepdim=True)
    of_lse = torch.logsumexp(y + of_y, 1, keepdim=True) - torch.logsumexp(y, 1, keepdim=True)
    of_lse = of_lse + _OF_SUM
    index = torch.where(counted, target[:, None], 0)
    chosen = log_p.gather(1, index)
    of_logp = of_y.gather(1, index) + of_lse + 2.0**-24 * chosen.abs() + 2.0**-60
    of_h = (p * (log_p + h).abs() * of_y).sum(1, keepdim=True) * _SLACK
    of_h = of_h + _OF_WEIGHTED * ((p * log_p.abs()).sum(1, keepdim=True) + 17 * LN2 + h)
    of_h = of_h + 2.0**-24 * h

    # lse2 is fp32; ln p is y - lse, of which the fma rounds once.
    lse2 = torch.logsumexp(y, 1, keepdim=True).abs() / LN2
    of_log_p = of_y + of_lse + 2.0**-24 * (lse2 + log_p.abs())
    of_p = p * (torch.expm1(of_log_p) + 2.0**-22)
    step = 2.0**-22
    d_logits = (torch.zeros_like(p).scatter(1, index, 1.0) - p) * d_logp
    of_d_logits = of_p * d_logp.abs() + step * d_logits.abs()
    second = p * (log_p + h) * d_entropy
    of_second = of_p * (log_p + h).abs() + p * (of_log_p + of_h + step * (log_p.abs() + h))
    d_logits, of_d_logits = (
        d_logits - second,
        of_d_logits + of_second * d_entropy.abs() + step * second.abs(),
    )
    of_d_logits = (of_d_logits * slope + d_logits.abs() * of_slope) / tau
    d_logits = d_logits * slope / tau
    # 2^y is 0 below 2^-126, and y 2^y ends at y = -256; both are rounded to the dtype.
    of_d_logits = of_d_logits + 2.0**-125 * (d_logp.abs() + 256 * (1 + h) * d_entropy.abs()) / tau
    info = torch.finfo(hidden.dtype)
    of_d_logits = of_d_logits * _SLACK + info.eps / 2 * (
        d_logits.abs() + of_d_logits + info.smallest_normal
    )
    of_d_logits, d_logits = (torch.where(counted, t, 0.0) for t in (of_d_logits, d_logits))
    return Bounds(
        torch.where(counted, of_logp, 0.0)[:, 0],
        torch.where(counted, of_h, 0.0)[:, 0],
        _product(of_d_logits, d_logits, head.mT, entries),
        _padded(_product(of_d_logits.mT, d_logits.mT, rows.mT, len(rows)), len(weight)),
        _padded(
            of_d_logits.sum(0) + 5.25 * len(rows) * 2.0**-23 * d_logits.abs().sum(0), len(weight)
        ),
    )


def _product(of_a, a, b, size: int) -> torch.Tensor:
    """Bound of a chain over ``size`` with inexact operands: [M, K] · [N, K]ᵀ."""
    magnitude = b.abs().mT
    return (of_a + 5.25 * math.ceil(size / 16) * 2.0**-23 * a.abs()) @ magnitude


def _chain(order: str, width: int) -> float:
    if order == "chain":
        return 5.25 * math.ceil(width / 16) * 2.0**-23
    groups = math.ceil(leaves.length(width) / 16)
    return 5.25 * groups * 2.0**-23 + (leaves.count(width) - 1) * 2.0**-24


def _column(temperature: float | torch.Tensor) -> float | torch.Tensor:
    return temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature


def _padded(t: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([t, t.new_zeros(rows - len(t), *t.shape[1:])])
