"""TRL's ``GRPOTrainer`` with rollouts of vLLM, server or colocated: one contract, one log p.

    class Trainer(EngineLogps, trl.GRPOTrainer): ...
    Trainer(..., contract=ck.contract(model=model))

vLLM, with our plug-in ─> log p of each token ──> old log p ─┐
one pass over the padded batch ─> ck.linear_logp ─> new log p ─┴─> the ratio

Before each rollout the contracts of all workers of the engine are compared with the trainer's: an
engine without the plug-in, or one with other formulas, stops the trainer before a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..errors import ArgumentTypeError, ArgumentValueError, expected
from ..runtime.process_contract import Contract
from .contract_exchange import require_engine, worker_contract
from .trl import AUTOCAST, SampledLogps, _check_off, _setting

__all__ = ["EngineLogps", "engine_contracts"]

#: Method of `contract_exchange.WorkerExtension` that a server is asked for.
_METHOD = "cute_kernels_contract"


class EngineLogps(SampledLogps):
    """Mixin for ``trl.GRPOTrainer`` with ``use_vllm``, first in the bases; see the module.

    Old log-probabilities are vLLM's.  In training they are ``ck.linear_logp``'s if the contract
    says that logits are float32, else ``ck.log_probs``'s of the model's logits.

    Guarantees:
        With equal contracts and weights, and before the first step: each ratio is 1.
    """

    _taken = ("use_vllm",)

    def __init__(self, *args: object, contract: Contract, **kwargs: object):
        """Create a trainer, and compare the contracts of the engine, which is started by then.

        Args:
            args, kwargs: As `SampledLogps`.
            contract: ``ck.contract(model=model)`` of the patched model that learns.

        Raises:
            ContractError: a worker of the engine has another contract.
            ArgumentTypeError: ``contract`` is none, or one without a model.
            ArgumentValueError: vLLM is off; or autocast is on, which the engine has not.
            Others: as `SampledLogps`.
        """
        if not isinstance(contract, Contract) or contract.logits_dtype is None:
            want = "ck.contract(model=model)"
            got = "one without a model" if isinstance(contract, Contract) else repr(contract)
            raise ArgumentTypeError(expected("contract", want, got))
        super().__init__(*args, **kwargs)
        if not _setting("use_vllm", self, "use_vllm"):
            raise ArgumentValueError(expected("args.use_vllm", "True, or SampledLogps", False))
        for name in AUTOCAST:
            _check_off(f"args.{name}", self.args, name)
        self._contract = contract
        self._require_engine()

    def _require_engine(self) -> None:
        require_engine(self._contract, engine_contracts(self.vllm_generation))

    def _generate_single_turn(
        self, prompt_ids: Sequence[Sequence[int]], *args: object, **kwargs: object
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Method of TRL; contracts are compared, and each token has a log p."""
        self._require_engine()
        # Past SampledLogps, which records what this process's model draws.
        generate = super(SampledLogps, self)._generate_single_turn
        completions, logps = generate(prompt_ids, *args, **kwargs)
        for tokens, scores in zip(completions, logps or [[]], strict=True):
            if len(tokens) != len(scores) or any(score is None for score in scores):
                want = "a log p for each token of each completion"
                raise ArgumentValueError(expected("vLLM's logprobs", want, "less"))
        return completions, logps

    def _scored(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = self._contract.logits_dtype != "float32"
        score = super()._scored if rounded else self._without_logits
        return score(model, ids, mask, keep)


def engine_contracts(generation: object) -> list[dict[str, object]]:
    """Return the contracts of all workers of TRL's ``VLLMGeneration``; every rank calls it.

    Args:
        generation: In mode ``"colocate"`` its ``llm`` is asked.  In mode ``"server"`` the server:
            run with ``VLLM_SERVER_DEV_MODE=1`` and the worker extension of `contract_exchange`;
            the main process asks, and all ranks get the answers.

    Raises:
        ArgumentValueError: another mode.
    """
    if generation.mode == "colocate":
        return generation.llm.collective_rpc(worker_contract)
    if generation.mode != "server":
        want = "'server' or 'colocate'"
        raise ArgumentValueError(expected("args.vllm_mode", want, repr(generation.mode)))
    answers: list[object] = [None]
    client = getattr(generation, "vllm_client", None)
    if client is not None:  # the main process
        url = f"{client.base_url}/collective_rpc"
        answers = [client._post(url, json={"method": _METHOD})["results"]]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(answers, src=0)
    return answers[0]
