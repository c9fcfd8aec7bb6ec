"""The loss of TRL's ``GRPOTrainer`` by `cute_kernels.linear_policy_loss`: no logits of a batch.

    class Trainer(FusedLoss, trl.GRPOTrainer): ...

The semantics are those of ``_compute_loss`` of TRL 1.16.0.  TRL is not imported: a ``GRPOConfig``,
or a mapping of its fields, is read.  What needs log-probs or entropies of other tokens before a
token's weight is known is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, expected, one_of
from ..runtime import checking
from . import causal_lm
from .engine_layers import fp32_logits
from .sharded_head import Scoring, head_logp
from .token_logps import policy_loss
from .trl import BATCHED, IGNORED, TESTED, Draws, SampledLogps, head_order

__all__ = ["TESTED", "FusedLoss", "loss_options", "loss_tensors"]

#: ``loss_type`` -> (loss, reduction); those in `_OF_ITEMS` are divided by the items of all ranks.
_LOSSES = {
    "grpo": ("grpo", "sequence_mean"),
    "bnpo": ("grpo", "token_mean"),
    "dr_grpo": ("dr_grpo", "constant"),
    "dapo": ("dapo", "token_mean"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "luspo": ("grpo", "constant"),
}
_OF_ITEMS = ("dapo", "cispo")
#: Fields of a config, and their defaults where a mapping lacks them.
_DEFAULTS: dict[str, object] = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": False,
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "max_completion_length": 512,
    "temperature": 1.0,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
}
#: Field -> (the value that is taken, why no other is).
_REFUSED = {
    "importance_sampling_level": (
        "token",
        "a sequence's ratio needs the log-probs of all of its tokens first",
    ),
    "top_entropy_quantile": (1.0, "its mask needs the entropies of all tokens first"),
    "off_policy_mask_threshold": (None, "its mask needs the log-probs of whole sequences first"),
    "use_adaptive_entropy": (False, "its coefficient is the trainer's: give the one that holds"),
}
#: Entries of a step's inputs that the loss reads, or may leave alone.
_INPUTS = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages",
    "num_items_in_batch", "old_per_token_logps", "sampling_per_token_logps",
    "ref_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip


class FusedLoss(SampledLogps):
    """Mixin for ``trl.GRPOTrainer``, first in its bases: the loss by ``ck.linear_policy_loss``.

    Log-probabilities of rollout, reference and training are `cute_kernels.linear_logp`'s, of logits
    that are not rounded.  Generation draws from these logits.  With vLLM the bases are
    ``(FusedLoss, EngineLogps, trl.GRPOTrainer)``, and the contract's logits float32.

    Guarantees:
        Those of `SampledLogps`.
    """

    def __init__(self, *args: object, **kwargs: object):
        """Create a trainer.

        Args:
            args, kwargs: As in `SampledLogps`, or `EngineLogps`.

        Raises:
            ArgumentValueError: a setting that `loss_options` refuses; fp16; continuous batching;
                ``rollout_contracts``; a contract of rounded logits.
            Others: as `SampledLogps`.
        """
        if kwargs.get("rollout_contracts") is not None:
            want = "None, as training runs ops that no rollout runs (ck.compare_contracts)"
            raise ArgumentValueError(expected("rollout_contracts", want, "a mapping"))
        super().__init__(*args, **kwargs)
        loss_options(self.args, num_items_in_batch=1.0)
        contract = getattr(self, "_contract", None)
        logits = "float32" if contract is None else contract.logits_dtype
        for name, value, taken, why in (
            ("args.fp16", self.args.fp16, False, "its scaler multiplies gradients that are made"),
            (f"args.{BATCHED}", getattr(self, BATCHED), False, "it scores rounded logits"),
            ("contract.logits_dtype", logits, "float32", "the loss does not round logits"),
        ):
            if value != taken:
                raise ArgumentValueError(expected(name, f"{taken} ({why})", value))

    @contextlib.contextmanager
    def _drawn(self, model: torch.nn.Module) -> Iterator[Draws]:
        """Record the hidden states that the model's calls draw from, and let them draw in fp32."""
        head, order = causal_lm.head(model).module, head_order(model)
        change = causal_lm.transform(model)
        temperature = self.temperature / change.scale
        scoring = Scoring(order, temperature, change.softcap, IGNORED)
        states: list[torch.Tensor] = []

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            states[:] = [hidden[:, -1]]
            operands = [hidden, head.weight, getattr(head, "bias", None)]
            if checking.autocast(hidden.device):
                dtype = torch.get_autocast_dtype(hidden.device.type)
                operands = [t if t is None else t.to(dtype) for t in operands]
            return fp32_logits(*operands, order=order)

        draws = Draws(lambda rows, ids: head_logp(head, rows, ids, scoring), lambda _: states[0])
        with causal_lm.other_forward(head, forward), draws.recording(model):
            yield draws

    def _scored(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._without_logits(model, ids, mask, keep)

    def _compute_loss(self, model: torch.nn.Module, inputs: Mapping) -> torch.Tensor:
        """Method of TRL."""
        for name in inputs.keys() - _INPUTS:
            if inputs[name] is not None:
                raise ArgumentValueError(expected(name, "text alone", type(inputs[name]).__name__))
        training = self.model.training
        options = loss_options(
            self.args,
            num_items_in_batch=inputs["num_items_in_batch"],
            num_processes=self.accelerator.num_processes,
            accumulation_steps=self.current_gradient_accumulation_steps if training else None,
            training=training,
        )
        tensors = loss_tensors(inputs)
        ids, mask = (
            torch.cat((inputs[f"prompt_{part}"], inputs[f"completion_{part}"]), dim=1)
            for part in ("ids", "mask")
        )
        with self.accelerator.autocast():
            out = policy_loss(
                model,
                ids,
                attention_mask=mask,
                last=inputs["completion_ids"].shape[1],
                order=head_order(model),
                return_entropy=True,
                **tensors,
                **options,
            )
        self._log_ratio(out.logp, inputs)
        count = (tensors["mask"] != 0).sum()
        clips = "cispo_clip_ratio" if options["loss"] == "cispo" else "clip_ratio/region_mean"
        logged = {"kl": out.metrics.kl, "entropy": out.metrics.entropy}
        for name, mean in (logged | {clips: out.metrics.clip_fraction}).items():
            if mean is not None:
                self._log_share(name, mean * count, count)
        return out.loss


def loss_options(
    config: object,
    *,
    num_items_in_batch: float | torch.Tensor | None = None,
    num_processes: int = 1,
    accumulation_steps: int | None = None,
    training: bool = True,
) -> dict[str, object]:
    """Options of `cute_kernels.linear_policy_loss` for the settings of a ``GRPOTrainer``.

    Args:
        config: A ``trl.GRPOConfig``, or a mapping of its fields; a field that is missing has TRL's
            default.
        num_items_in_batch: Tokens of the generation batch on all ranks, for ``"dapo"`` and
            ``"cispo"``: ``inputs["num_items_in_batch"]``.
        num_processes: Ranks of the trainer.
        accumulation_steps: Micro-batches of this optimizer step
            (``trainer.current_gradient_accumulation_steps``); None: those of the config.
        training: False for an evaluation, which accumulates nothing.

    Returns:
        Keyword arguments: loss, reduction, clips, KL and entropy weights, temperature, loss_scale.

    Raises:
        ArgumentTypeError, ArgumentValueError: a setting that one sweep over the tokens cannot
            compute, or a value that is missing; the message names it.
    """
    fields = {name: _field(config, name) for name in _DEFAULTS}
    for name, (taken, why) in _REFUSED.items():
        if fields[name] != taken:
            raise ArgumentValueError(expected(name, f"{taken!r} ({why})", repr(fields[name])))
    kind = fields["loss_type"]
    if kind not in _LOSSES:
        raise ArgumentValueError(one_of("loss_type", _LOSSES, kind))
    steps = accumulation_steps
    if steps is None:
        steps = fields["gradient_accumulation_steps"]
    steps = _count("accumulation_steps", steps) if training else 1
    loss, reduction = _LOSSES[kind]
    options = {"loss": loss, "reduction": reduction, "temperature": fields["temperature"]}
    options |= _clips(kind, fields)
    if fields["beta"]:
        options["kl_weight"] = fields["beta"]
        options["kl"] = "k3_importance" if fields["use_bias_correction_kl"] else "k3"
    scale = 1.0 / steps
    if fields["entropy_coef"]:
        # A mean over this micro-batch's tokens, whatever the loss is divided by.
        options["entropy_reduction"] = "token_mean"
        of_items = kind in _OF_ITEMS
        options["entropy_weight"] = fields["entropy_coef"] * (scale if of_items else 1.0)
    if kind in _OF_ITEMS:
        if num_items_in_batch is None:
            want = f"the tokens of the batch on all ranks, as loss_type is {kind!r}"
            raise ArgumentValueError(expected("num_items_in_batch", want, "None"))
        options["divisor"] = _items(num_items_in_batch, _count("num_processes", num_processes))
        if training:
            window = fields["steps_per_generation"] or fields["gradient_accumulation_steps"]
            options["divisor"] = options["divisor"] * steps / window
    else:
        options["loss_scale"] = scale
    if reduction == "constant":
        # luspo: a sum over a sequence's tokens, and a mean over the sequences.
        options["max_length"] = 1.0 if kind == "luspo" else fields["max_completion_length"]
    return options


def loss_tensors(inputs: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Tensors of `cute_kernels.linear_policy_loss` in a ``GRPOTrainer``'s inputs of a step.

    ``completion_mask`` times ``tool_mask``, advantages, log-probs of the sampling policy and of the
    reference, and vLLM's importance ratio as ``token_weights``; those that are there.
    """
    mask = inputs["completion_mask"]
    if inputs.get("tool_mask") is not None:
        mask = mask * inputs["tool_mask"]
    named = {
        "advantages": "advantages",
        "old_logp": "old_per_token_logps",
        "reference_logp": "ref_per_token_logps",
        "token_weights": "importance_sampling_ratio",
    }
    tensors = {ours: inputs.get(theirs) for ours, theirs in named.items()}
    return {"mask": mask} | {name: t for name, t in tensors.items() if t is not None}


def _clips(kind: str, fields: Mapping) -> dict[str, float]:
    if kind == "sapo":
        return {
            "gate_positive": fields["sapo_temperature_pos"],
            "gate_negative": fields["sapo_temperature_neg"],
        }
    low, high = fields["epsilon"], fields["epsilon_high"]
    high = low if high is None else high
    if kind == "cispo":
        if high < 1:
            want = "1 or more with loss_type 'cispo', which bounds the ratio itself by it"
            raise ArgumentValueError(expected("epsilon_high", want, high))
        return {"clip_low": 1.0, "clip_high": high - 1.0}
    clips = {"clip_low": low, "clip_high": high}
    if fields["delta"] is not None:
        if fields["delta"] < 1 + high:
            want = f"at least 1 + epsilon_high = {1 + high}"
            raise ArgumentValueError(expected("delta", want, fields["delta"]))
        clips["max_ratio"] = fields["delta"]
    return clips


def _count(name: str, value: object) -> int:
    if checking.integer(name, value, "an int of 1 or more") < 1:
        raise ArgumentValueError(expected(name, "1 or more", value))
    return value


def _items(count: float | torch.Tensor, processes: int) -> float | torch.Tensor:
    if isinstance(count, torch.Tensor):
        return count.double().clamp(min=1.0) / processes
    return max(float(count), 1.0) / processes


def _field(config: object, name: str) -> object:
    if isinstance(config, Mapping):
        return config.get(name, _DEFAULTS[name])
    if not hasattr(config, "loss_type"):
        want = "a GRPOConfig, or a mapping of its fields"
        raise ArgumentTypeError(expected("config", want, type(config).__name__))
    return getattr(config, name, _DEFAULTS[name])
