"""Drawn problems of linear_policy_loss, its composed form, and its losses in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import cute_kernels as ck
from cute_kernels.logp import policy_losses, policy_sweep
from cute_kernels.logp.policy_losses import LOSSES
from cute_kernels.runtime import plan_cache
from tests.oracles import logp as reference

BF16, FP32 = torch.bfloat16, torch.float32
IGNORED = -100
#: Options of the loss that every test of all losses runs with.
OPTIONS = {
    "clip_low": 0.1, "clip_high": 0.3, "max_ratio": 1.7, "gate_positive": 1.5, "gate_negative": 0.8,
}  # fmt: skip
MASKS = ("none", "some", "empty sequence", "nothing")
SIZES = (3, 17, 24, 90)


class Problem(NamedTuple):
    """hidden [B, L, D], weight [V, D], bias [V] or None, target [B, L], and what the loss takes."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    mask: torch.Tensor | None
    tensors: dict[str, torch.Tensor]


def problem(
    name: str,
    mask: str,
    *,
    seed: int = 0,
    sizes=SIZES,
    dtype=BF16,
    bias: bool = False,
    device: str = "cpu",
) -> Problem:
    """A problem of the loss ``name`` with ratios on both sides of its bounds; masked rows are NaN.

    sizes: (B, L, D, V).  On a GPU they are larger by default.
    """
    if device == "cuda" and sizes == SIZES:
        sizes = (4, 75, 96, 1040)
    generator = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    b, length, width, vocab = sizes
    hidden, weight = drawn(b, length, width).to(dtype), (drawn(vocab, width) * 0.4).to(dtype)
    offset = drawn(vocab).to(dtype) if bias else None
    target = torch.randint(0, vocab, (b, length), generator=generator)
    kept = torch.ones(b, length, dtype=torch.bool)
    if mask != "none":
        kept = torch.rand(b, length, generator=generator) > 0.3
    if mask == "empty sequence":
        kept[1] = False
    if mask == "nothing":
        kept[:] = False
    logp = ck.linear_logp(hidden, weight, target, offset)
    row = LOSSES.get(name)
    tensors = {"reference_logp": logp + 0.5 * drawn(b, length)}
    if row is None or row.advantages:
        tensors["advantages"] = drawn(b, length)
    if row is None or row.old_logp:
        tensors["old_logp"] = logp + 0.4 * drawn(b, length)
    hidden = torch.where(kept[..., None], hidden, math.nan)
    tensors = {key: torch.where(kept, t, math.nan) for key, t in tensors.items()}
    made = hidden, weight, offset, target, None if mask == "none" else kept
    tensors = {key: t.to(device) for key, t in tensors.items()}
    return Problem(*(None if t is None else t.to(device) for t in made), tensors)


def options_of(name: str, **options) -> dict:
    """Keyword arguments of a call with every option that the loss has."""
    row = LOSSES[name]
    made = {key: value for key, value in OPTIONS.items() if key in row.options}
    if options.get("reduction", row.reduction) == "constant":
        made["max_length"] = 20.0
    return made | {"kl_weight": 0.3, "kl": "k3"} | options


class Results(NamedTuple):
    """Of a forward and a backward; gradients that were not asked for are None."""

    loss: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor | None
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def leaves_of(x: Problem, needs=(True, True, True)) -> list[torch.Tensor | None]:
    """hidden, weight and bias as leaves."""
    return [
        None if t is None else t.clone().requires_grad_(need)
        for t, need in zip(x[:3], needs, strict=True)
    ]


def fused(name, x: Problem, needs=(True, True, True), upstream=None, **options) -> Results:
    """Through the op."""
    leaves = leaves_of(x, needs)
    out = ck.linear_policy_loss(
        leaves[0], leaves[1], x.target, leaves[2], loss=name, mask=x.mask, **x.tensors, **options
    )
    out.loss.backward(upstream)
    gradients = [None if t is None else t.grad for t in leaves]
    return Results(out.loss.detach(), out.logp, out.entropy, *gradients)


def weights(x: Problem, reduction: str, options: dict) -> torch.Tensor:
    """fp32 weight of each token."""
    counted = torch.ones_like(x.target, dtype=torch.bool) if x.mask is None else x.mask
    return policy_losses.weights_of(
        counted, reduction, options.get("divisor"), options.get("max_length", 1.0),
        options.get("loss_scale", 1.0), None,
    ).view(x.target.shape)  # fmt: skip


def for_entropy(reduction: str, options: dict) -> tuple[str, dict]:
    """(reduction, options) of the entropy term: a reduction of its own has no divisor."""
    if "entropy_reduction" not in options:
        return reduction, options
    return options["entropy_reduction"], options | {"divisor": None}


def composed(name: str, x: Problem, needs=(True, True, True), **options) -> Results:
    """`linear_logp`, the same torch function of the loss, and torch's autograd through both."""
    row = LOSSES[name]
    leaves = leaves_of(x, needs)
    counted = torch.ones_like(x.target, dtype=torch.bool) if x.mask is None else x.mask
    target = torch.where(counted, x.target, IGNORED)
    # On a GPU fp32 runs on Triton, whose dweight is that of a main_grad of zeros.
    state = None
    if x.weight.is_cuda and x.weight.dtype == FP32:
        state = options["main_grad"] = torch.zeros_like(x.weight)
    names = ("temperature", "softcap", "vocab_size", "order", "main_grad")
    head = {key: options[key] for key in names if key in options}
    bonus = options.get("entropy_weight", 0.0)
    out = ck.linear_logp(
        leaves[0], leaves[1], target, leaves[2], return_entropy=bool(bonus), **head
    )
    logp, entropy = out if bonus else (out, None)
    tensors = {key: torch.where(counted, t, 0.0) for key, t in x.tensors.items()}
    takes = ["advantages"] * row.advantages + ["old_logp"] * row.old_logp
    chosen = dict(row.options) | {k: v for k, v in options.items() if k in row.options}
    term = row.function(logp, None, **{key: tensors[key] for key in takes}, **chosen)
    if options.get("kl_weight"):
        kl = policy_losses.KL[options["kl"]](
            logp, tensors["reference_logp"], tensors.get("old_logp")
        )
        term = term + options["kl_weight"] * kl
    reduction = options.get("reduction", row.reduction)
    loss = (torch.where(counted, term, 0.0) * weights(x, reduction, options)).sum()
    if bonus:
        of_entropy = weights(x, *for_entropy(reduction, options))
        loss = loss - (entropy * (bonus * of_entropy)).sum()
    loss.backward()
    entropy = None if entropy is None else entropy.detach()
    made = [None if t is None else t.grad for t in leaves]
    made[1] = made[1] if state is None else state
    return Results(loss.detach(), logp.detach(), entropy, *made)


def budget(patch, tokens: int, x: Problem) -> None:
    """Give a sweep's logits the bytes of so many tokens; cached plans have other launches."""
    plan_cache.clear()
    most = 4 * len(x.weight) * tokens
    for name in ("LOGITS_BYTES", "UNCUT_BYTES"):
        patch.setattr(policy_sweep, name, {"cpu": most, "cuda": most})


# ---- float64 -------------------------------------------------------------------------------------


def exact(name: str, x: Problem, **options) -> Results:
    """The loss by its published formula, and its gradients, in float64."""
    counted = torch.ones_like(x.target, dtype=torch.bool) if x.mask is None else x.mask
    flat = counted.reshape(-1)
    hidden = torch.where(counted[..., None], x.hidden, 0.0).double().flatten(0, -2)
    leaves = [hidden.requires_grad_(), x.weight.double().requires_grad_()]
    bias = None if x.bias is None else x.bias.double().requires_grad_()
    tau = options.get("temperature", 1.0)
    head = reference.Options(
        tau.reshape(-1) if isinstance(tau, torch.Tensor) else tau,
        options.get("softcap", 0.0), IGNORED, options.get("vocab_size"),
    )  # fmt: skip
    y = reference.logits(*leaves, bias, head)
    target = torch.where(flat, x.target.reshape(-1), IGNORED)
    logp, entropy = reference.of_logits(y, target, IGNORED)
    tensors = {k: torch.where(counted, t, 0.0).double().flatten() for k, t in x.tensors.items()}
    factor = tensors.pop("token_weights", 1.0)
    if callable(name):
        per_token = name(logp, entropy, **tensors) * factor
    else:
        per_token = formula(name, logp, tensors, options) * factor
    kl_weight = options.get("kl_weight", 0.0)
    if kl_weight:
        per_token = per_token + kl_weight * kl_formula(options["kl"], logp, tensors)
    default = "token_mean" if callable(name) else LOSSES[name].reduction
    reduction = options.get("reduction", default)
    loss = reduced(per_token, counted, reduction, options)
    bonus = options.get("entropy_weight", 0.0)
    if bonus:
        loss = loss - bonus * reduced(entropy, counted, *for_entropy(reduction, options))
    given = [t for t in (*leaves, bias) if t is not None]
    made = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
    made = [*made, None][:3]
    shape = x.target.shape
    return Results(
        loss.detach(), logp.detach().view(shape), entropy.detach().view(shape),
        made[0].view(x.hidden.shape), *made[1:],
    )  # fmt: skip


def reduced(values: torch.Tensor, counted: torch.Tensor, kind: str, options: dict) -> torch.Tensor:
    """The reduction by its definition, sequence after sequence."""
    sizes = [counted.shape[-1]] * counted[..., 0].numel()
    if "cu_seqlens" in options:
        sizes = options["cu_seqlens"].diff().tolist()
    parts = list(
        zip(values.reshape(-1).split(sizes), counted.reshape(-1).split(sizes), strict=True)
    )
    sums = [part[kept].sum() for part, kept in parts]
    lengths = [int(kept.sum()) for _, kept in parts]
    scale, divisor = options.get("loss_scale", 1.0), options.get("divisor")
    if kind == "sum":
        return scale * sum(sums) / (divisor or 1)
    if kind == "token_mean":
        return scale * sum(sums) / (divisor or max(1, sum(lengths)))
    if kind == "sequence_mean":
        means = [s / max(1, n) for s, n in zip(sums, lengths, strict=True)]
        return scale * sum(means) / (divisor or len(means))
    return scale * sum(sums) / ((divisor or len(sums)) * options["max_length"])


def formula(name: str, logp, tensors: dict, options: dict) -> torch.Tensor:
    """Loss of each token as its paper has it; torch.minimum, torch.sigmoid and the like."""
    a, old = tensors.get("advantages"), tensors.get("old_logp")
    ratio = None if old is None else (logp - old).exp()
    low, high = 1 - options.get("clip_low", 0.0), 1 + options.get("clip_high", 0.0)
    if name == "cross_entropy":
        return -logp
    if name == "dft":
        return -logp.detach().exp() * logp
    if name == "policy_gradient":
        return -a * logp
    if name == "importance_ratio":
        return -ratio * a
    if name == "cispo":
        return -ratio.clamp(low, high).detach() * a * logp
    if name == "sapo":
        tau = torch.where(a > 0, options["gate_positive"], options["gate_negative"]).double()
        return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * a
    if name == "spo":
        return -(ratio * a - a.abs() / (2 * options["clip_high"]) * (ratio - 1) ** 2)
    surrogate = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
    # Dual clip: a bound from below where the advantage is negative.
    return -torch.where(a < 0, torch.maximum(surrogate, options["max_ratio"] * a), surrogate)


def kl_formula(kind: str, logp, tensors: dict) -> torch.Tensor:
    """KL estimate of each token."""
    d = tensors["reference_logp"] - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    k3 = d.exp() - d - 1
    return k3 if kind == "k3" else (logp - tensors["old_logp"]).exp() * k3


#: Dtypes of gradients.
HALVES_AND_FP32 = (BF16, torch.float16, FP32)


def values(dtype: torch.dtype, shape=(5, 37)) -> torch.Tensor:
    """Values of every size, subnormals and infinities among them."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    drawn.view(-1)[:6] = torch.tensor([0.0, -0.0, 1e-7, 3e-39, torch.inf, -torch.inf])
    return drawn.to(dtype)
