"""Cases of linear_policy_loss."""

from __future__ import annotations

import functools

import torch

from tests.logp import policy_cases
from tests.option_table.calls import call

SIZES = (2, 5, 40, 48)
TOKENS = SIZES[:2]
#: Largest error of a sum, and of a gradient in bf16, as a share of the largest element.
OF_SUM, OF_GRADIENT = 2.0**-14, 2.0**-7


def _drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _function(logp, entropy, **tensors):
    return -logp * tensors["scale"] - 0.1 * entropy * tensors["advantages"]


def policy(loss: str = "grpo", kept=("advantages", "old_logp"), flat=False, bias=False, **options):
    """Shares of the loss, log p and gradients; ``kept``: tensors of the loss that are given."""
    named = loss if isinstance(loss, str) else "grpo"
    x = policy_cases.problem(named, "some", sizes=SIZES, seed=5, bias=bias)
    mask, ignored = x.mask, options.get("ignore_index", -100)
    target = x.target.clamp(max=options.get("vocab_size", 48) - 1)
    if "ignore_index" in options:
        target, mask = torch.where(mask, target.clamp(min=8), ignored), None
    given = {k: torch.nan_to_num(t) for k, t in x.tensors.items() if k in kept}
    given |= {k: options[k] for k in ("token_weights",) if k in options}
    x = x._replace(target=target)
    if flat:
        x = x._replace(
            hidden=x.hidden.flatten(0, 1), target=target.flatten(), mask=x.mask.flatten()
        )
        mask, given = x.mask, {k: t.flatten() for k, t in given.items()}
    leaves = policy_cases.leaves_of(x)
    options = {k: v for k, v in options.items() if k != "token_weights"}
    out = call(
        "linear_policy_loss", leaves[0], leaves[1], x.target, leaves[2],
        **{"loss": loss} | ({} if mask is None else {"mask": mask}) | given | options,
    )  # fmt: skip
    out.loss.backward()
    tensors = given | options.get("tensors", {})
    row = {} if callable(loss) else policy_cases.LOSSES[loss].options
    defaults = {k: v for k, v in row.items() if v is not None} | {"max_ratio": 1e9, "kl": "k3"}
    options.pop("logits_memory", None)  # no number follows it
    want = policy_cases.exact(loss, x._replace(tensors=tensors), **defaults | options)
    got = (out.loss.detach(), out.logp, out.entropy, *(t if t is None else t.grad for t in leaves))
    shares = {}
    for name, a, b in zip(want._fields, got, want, strict=True):
        if a is not None:
            limit = (OF_SUM if a.dtype == torch.float32 else OF_GRADIENT) * b.abs().max() + 1e-9
            shares[name] = ((a.double() - b).abs().max() / limit).item()
    return shares


OF_TOKENS, EACH = _drawn(*TOKENS, seed=31), _drawn(*TOKENS, seed=32).exp()
ALL = ("advantages", "old_logp", "reference_logp")
OPTIONS = {
    "plain": {},
    "row": {"loss": "dapo"},
    "function": {"loss": _function, "tensors": {"scale": OF_TOKENS}},
    "alone": {"loss": "cross_entropy", "kept": ()},
    "reference": {"kept": ALL, "kl_weight": 0.2},
    "kl": {"kept": ALL, "kl_weight": 0.2, "kl": "k2"},
    "token_weights": {"token_weights": EACH},
    "packed": {"flat": True, "cu_seqlens": torch.tensor([0, 3, 10])},
    "reduction": {"reduction": "sum", "divisor": 7.0},
    "divisor": {"divisor": torch.tensor(3.0)},
    "max_length": {"loss": "dr_grpo", "max_length": 6.0},
    "clip": {"clip_low": 0.1, "clip_high": 0.4, "max_ratio": 1.5},
    "gates": {"loss": "sapo", "gate_positive": 2.0, "gate_negative": 0.5},
    "entropy": {"entropy_weight": 0.1},
    "entropy_reduction": {"entropy_weight": 0.1, "entropy_reduction": "token_mean"},
    "return_entropy": {"return_entropy": True},
    "scale": {"loss_scale": 0.3},
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": EACH},
    "softcap": {"softcap": 3.0},
    "ignore_index": {"ignore_index": 7},
    "vocab_size": {"vocab_size": 43},
    "logits_memory": {"logits_memory": 4 << 30},
    "tree": {"order": "tree", "bias": True, "kept": ALL, "kl_weight": 0.2, "entropy_weight": 0.1},
}
TABLE = {
    "linear_policy_loss": {
        label: functools.partial(policy, **options) for label, options in OPTIONS.items()
    }
}
