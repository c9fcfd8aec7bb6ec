"""A training worker for a policy gradient with a reference model and KL, on `token_logps`.

How a loss becomes a step is the library's that holds the model: deepspeed.py, fsdp.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist

from .. import contracts
from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..runtime import checking
from . import causal_lm, gathering
from .policy_loss import policy_loss
from .token_logps import token_logps


class Trainer:
    """Steps of a policy; a subclass says what a step is (`update`).

    Attributes:
        model: What is called: the model, or an engine around it.
        group: Ranks that train one model on parts of a batch; None: all there are.
    """

    group: dist.ProcessGroup | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        reference: torch.nn.Module | None = None,
        *,
        kl_weight: float = 0.0,
        clip: float = 0.2,
        temperature: float = 1.0,
        order: str = "chain",
    ):
        """Create a worker.

        Args:
            model: A causal LM, or what wraps one; all ranks have one.
            reference: Another, for the KL; it is evaluated without gradients.  None: batches bring
                ``ref_logps``, or there is no KL.
            kl_weight, clip: As in ``policy_loss``.  temperature, order: As in ``token_logps``.

        Raises:
            ArgumentTypeError: no causal LM with a linear head is in ``model`` or ``reference``.
        """
        self.model, self.reference = model, reference
        self.kl_weight, self.clip = kl_weight, clip
        self._scoring = {"temperature": temperature, "order": order}
        for causal_model in (model, reference):
            if causal_model is not None:
                causal_lm.head(causal_lm.unwrapped(causal_model)[1])

    def update(self, loss: torch.Tensor) -> None:
        """Run the backward and a step; gradients are averaged over ranks."""
        raise TypeError(f"{type(self).__name__} has no update(loss)")

    def logps(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return log p of ``input_ids[:, 1:]``, fp32 [B, S - 1], with gradients if enabled."""
        mask = batch.get("attention_mask")
        return token_logps(self.model, batch["input_ids"], attention_mask=mask, **self._scoring)

    @torch.no_grad()
    def reference_logps(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Log-probabilities of the reference: the batch's own, the reference model's, or None."""
        if "ref_logps" in batch or self.reference is None:
            return batch.get("ref_logps")
        mask = batch.get("attention_mask")
        with _evaluating(self.reference):
            return token_logps(
                self.reference, batch["input_ids"], attention_mask=mask, **self._scoring
            )

    def step(self, batch: Mapping[str, torch.Tensor]) -> dict[str, object]:
        """Run one step on this rank's part of a batch; all ranks call it.

        What one rank alone refuses of its part, the others wait for, until their group's timeout.

        Args:
            batch: ``input_ids`` int [B, S]; ``advantages`` [B], [B, 1] or [B, S]; and, each if it
                is there: ``attention_mask`` [B, S]; ``mask`` [B, S], not 0 at tokens to learn from
                (without it: all but the first); ``old_logps`` and ``ref_logps`` fp32 [B, S - 1].

        Returns:
            Metrics of the batch, over all ranks: ``loss``, ``policy_loss``, ``kl``, ``tokens``;
            ``current_logp_path``: ``"linear_logp"``, or ``"linear_logp/gathered"`` if the head is
            in parts; ``current_logp_backend``: the one that its tensors' device has.

        Raises:
            ArgumentTypeError: a key is missing.  ArgumentValueError: no token counts on any rank,
            or a KL is asked for and there is no reference.  Others: as ``token_logps``.
        """
        for name in ("input_ids", "advantages"):
            if not isinstance(batch.get(name), torch.Tensor):
                type_name = type(batch.get(name)).__name__
                raise ArgumentTypeError(expected(f"batch[{name!r}]", "a tensor", type_name))
        reference = self.reference_logps(batch)
        if reference is None and self.kl_weight:
            want = "ref_logps, or a reference model, as kl_weight is not 0"
            raise ArgumentValueError(expected("batch", want, "neither"))
        mask = learnt(batch)
        ranks, count = self._counted(mask)
        losses = policy_loss(
            self.logps(batch),
            _token_advantages(batch["advantages"]),
            mask,
            count=count,
            old=batch.get("old_logps"),
            reference=reference,
            clip=self.clip,
            kl_weight=self.kl_weight,
        )
        # Ranks average their gradients; the loss is a sum over all tokens.
        self.update(losses.loss * ranks)
        sums = torch.stack([t.detach() for t in losses])
        if ranks > 1:
            dist.all_reduce(sums, group=self.group)
        loss, policy, kl = sums.tolist()
        return {"loss": loss, "policy_loss": policy, "kl": kl, "tokens": count, **self.path()}

    def path(self) -> dict[str, str]:
        """Op that computes log-probabilities from the head's own tensors."""
        weight = causal_lm.head(causal_lm.unwrapped(self.model)[1]).module.weight
        device, dtype = weight.device, weight.dtype
        if checking.autocast(device):
            dtype = torch.get_autocast_dtype(device.type)
        cut = gathering.partitioned(weight) or hasattr(weight, "full_tensor")
        backend = contracts.contract_id("linear_logp", device, dtype).split("/")[1]
        return {
            "current_logp_path": "linear_logp/gathered" if cut else "linear_logp",
            "current_logp_backend": backend,
        }

    def contract_ids(self) -> dict[str, str]:
        """Contract ids of the scoring op, for a manifest."""
        weight = causal_lm.head(causal_lm.unwrapped(self.model)[1]).module.weight
        return {"linear_logp": contracts.contract_id("linear_logp", weight.device, weight.dtype)}

    def _counted(self, mask: torch.Tensor) -> tuple[int, int]:
        """Return the number of ranks, and of tokens that count on all of them."""
        count = mask.sum()
        joined = dist.is_available() and dist.is_initialized()
        ranks = dist.get_world_size(self.group) if joined else 1
        if ranks > 1:
            dist.all_reduce(count, group=self.group)
        if not int(count):
            want = "a token that counts, on some rank"
            raise ArgumentValueError(expected("batch['mask']", want, "none"))
        return ranks, int(count)


def learnt(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mask, bool [B, S - 1], of the tokens of ``input_ids[:, 1:]`` that count."""
    learnt_mask = torch.ones_like(batch["input_ids"], dtype=torch.bool)[:, 1:]
    if (mask := batch.get("mask")) is not None:
        learnt_mask = learnt_mask & (mask[:, 1:] != 0)
    if (attention_mask := batch.get("attention_mask")) is not None:
        learnt_mask = learnt_mask & (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
    return learnt_mask


def _token_advantages(advantages: torch.Tensor) -> torch.Tensor:
    if advantages.dim() == 1:
        return advantages[:, None]
    return advantages if advantages.shape[1] == 1 else advantages[:, 1:]


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put the model in eval mode; each of its modules gets its mode back at the end."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
