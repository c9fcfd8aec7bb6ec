"""TRL's ``GRPOTrainer``: the log-probabilities of rollout and training, byte for byte the same.

    class Trainer(SampledLogps, trl.GRPOTrainer): ...

generate, token by token, with a cache ─> logits ─> ck.log_probs ─> old log p ─┐
one pass over the padded batch ─────────> logits ─> ck.log_probs ─> new log p ─┴─> the ratio

TRL draws tokens from one and learns from the other.  Its own trainer has no log-probabilities of
generation to compare with, counts padding on the left as positions, and scores with torch's product
and exponentials.  `SampledLogps` replaces these three, and nothing else of it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ContractError, expected
from ..logp import api as logp
from ..runtime import process_contract
from . import causal_lm, continuous_batching
from .sharded_head import NOTES
from .token_logps import token_logps

__all__ = ["SampledLogps", "contracts_in_use", "require_same_contracts"]

#: The version that the tests ran with: what is replaced below is not TRL's public interface.
TESTED = "1.16.0"

#: The target of tokens that are not scored.
IGNORED = -100
#: Methods that are replaced; TRL's must begin with the parameters of ours.
_REPLACED = (
    "_generate_single_turn",
    "_generate_and_score_completions",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
#: Settings of a trainer under which other code than the model's makes the logits.
_REFUSED = ("use_vllm", "aux_loss_enabled")
#: Settings that are refused where generation has no autocast: in continuous batching and vLLM.
AUTOCAST = ("bf16", "fp16")
#: Function of TRL's module that puts a head around a model's forward.
_FUSED_HEAD = "add_fused_lm_head"
BATCHED = "use_transformers_continuous_batching"
_REFUSED_ARGUMENTS = ("cast_lm_head_to_fp32", "use_liger_kernel")


class SampledLogps:
    """Mixin for ``trl.GRPOTrainer``, first in the bases of a trainer; see the module.

    The importance ratio is that of the policy as it learns to the policy as it sampled, also in
    TRL's aligned case, where it takes the ratio for 1.  Log-probabilities are those of
    softmax(logits / temperature), before ``top_p`` and other filters, as TRL's are.

    Guarantees:
        With a model that ``ck.patch`` left nothing of, and before its first step: the log p of each
        token is that of its generation, in every byte, so each ratio is 1; and that of a patched
        reference with the same weights, so the KL is 0.
    """

    #: Settings of `_REFUSED` that a subclass takes.
    _taken: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse bases in an order in which TRL's own methods come first."""
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[: cls.__mro__.index(SampledLogps)]:
            if not issubclass(base, SampledLogps) and vars(base).keys() & set(_REPLACED):
                want = f"SampledLogps and its subclasses before {base.__name__} in the bases"
                raise ArgumentTypeError(expected(cls.__name__, want, f"{base.__name__} first"))

    def __init__(
        self, *args: object, rollout_contracts: Mapping[str, str] | None = None, **kwargs: object
    ):
        """Create a trainer.

        Args:
            args, kwargs: As ``trl.GRPOTrainer``.
            rollout_contracts: What `contracts_in_use` said where ``rollout_func`` generates, if
                that is not this process.  It is compared after the first forward pass, before the
                first step.

        Raises:
            ArgumentTypeError: the next base is no GRPOTrainer of a form that is known.
            ArgumentValueError: a setting by which other code makes the logits: vLLM, a head in
                fp32, Liger, a router's loss; with continuous batching, autocast.

        The first rollout raises PatchError if ``ck.patch`` left parts of the model, or of the
        reference, whose bits follow the batch.
        """
        for name in _REPLACED:
            _check_method(getattr(super(), name, None), name)
        # RLOOTrainer and others make ratios of other log-probabilities.
        theirs = [c.__name__ for c in type(self).__mro__ if c.__module__.startswith("trl.")]
        if "GRPOTrainer" not in theirs:
            _refuse_trainer("old_per_token_logps", next(iter(theirs), type(self).__name__))
        if rollout_contracts is not None:
            _check_ids("rollout_contracts", rollout_contracts)
        with _without_fused_head(type(self)):
            super().__init__(*args, **kwargs)
        if self.ref_model is not None:
            _drop_autocast(self.ref_model)
        for name in _REFUSED:
            if name not in self._taken:
                _check_off(name, self, name)
        batched = bool(_setting(BATCHED, self, BATCHED))
        for name in _REFUSED_ARGUMENTS + (AUTOCAST if batched else ()):
            _check_off(f"args.{name}", self.args, name)
        if batched:
            continuous_batching.register()
        self._rollout_contracts = rollout_contracts

    def _require_patched(self) -> None:
        """Refuse models with parts whose bits follow the batch: ratios would not be 1, unsaid."""
        causal_lm.require_patched("trainer.model", self.model)
        if self.ref_model is not None:
            causal_lm.require_patched("trainer.ref_model", self.ref_model)

    # ---- rollout --------------------------------------------------------------------------------

    def _generate_single_turn(
        self, prompt_ids: Sequence[Sequence[int]], *args: object, **kwargs: object
    ) -> tuple[list[list[int]], list[list[float]]]:
        """TRL's generation in training's autocast, with log p of each token instead of None."""
        outer = self.accelerator.unwrap_model(self.model_wrapped)
        if getattr(self, BATCHED):
            with _batched(outer) as batches:
                completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            return completions, batches.logps(completions)
        model = causal_lm.unwrapped(outer)[1]
        # TRL's autocast is around the trainer's forward alone: an fp32 adapter would compute in
        # fp32 when it samples and in bf16 when it learns.
        with self.accelerator.autocast(), self._drawn(model) as draws:
            completions, _ = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return completions, draws.logps(completions)

    @contextlib.contextmanager
    def _drawn(self, model: torch.nn.Module) -> Iterator[Draws]:
        """Record the logits that the model's calls draw from."""

        def scored(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            # Training scores outside of autocast.
            with torch.autocast(logits.device.type, enabled=False):
                return logp.log_probs(
                    logits, tokens, temperature=self.temperature, ignore_index=IGNORED
                )

        draws = Draws(scored, lambda output: output.logits[:, -1])
        with draws.recording(model):
            yield draws

    def _generate_and_score_completions(self, inputs: list) -> dict[str, object]:
        """Method of TRL; the old log p are those of generation."""
        self._require_patched()
        outputs = super()._generate_and_score_completions(inputs)
        sampled = outputs.get("sampling_per_token_logps")
        if not isinstance(sampled, torch.Tensor):
            raise ArgumentTypeError(expected("rollout_func", "logprobs for each token", sampled))
        return outputs | {"old_per_token_logps": sampled}

    # ---- training -------------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: Mapping) -> torch.Tensor:
        """Method of TRL; logs the share of tokens whose importance ratio is not exactly 1."""
        loss = super()._compute_loss(model, inputs)
        self._log_ratio(self._new_logps, inputs)
        return loss

    def _log_ratio(self, logps: torch.Tensor, inputs: Mapping) -> None:
        counted = inputs["completion_mask"] != 0
        if inputs.get("tool_mask") is not None:
            counted = counted & (inputs["tool_mask"] != 0)
        ratio = (logps - inputs["old_per_token_logps"])[counted].exp()
        self._log_share("sampling/ratio_not_one", (ratio != 1).sum(), counted.sum())

    def _log_share(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Log a sum over tokens of all ranks, divided by their number."""
        totals = self.accelerator.reduce(torch.stack((total, count)).float(), reduction="sum")
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append((totals[0] / totals[1].clamp(min=1)).item())

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **options: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return (log p, entropy if asked for, None), fp32 [B, logits_to_keep], 0 at padding."""
        for name, value in options.items():
            if value is not None and value is not False:
                want = "text alone"
                raise ArgumentValueError(expected(name, want, type(value).__name__))
        parts = batch_size or len(input_ids)
        scored = [
            self._scored(model, ids, mask, logits_to_keep)
            for ids, mask in zip(input_ids.split(parts), attention_mask.split(parts), strict=True)
        ]
        logps, entropies = (torch.cat(column) for column in zip(*scored, strict=True))
        self._new_logps = logps.detach()
        if self._rollout_contracts is not None:
            require_same_contracts(contracts_in_use(logps.device), self._rollout_contracts)
            self._rollout_contracts = None
        return logps, entropies if compute_entropy else None, None

    def _scored(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The first token is at position 0, whatever padding is before it, as in `generate`.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        with self.accelerator.autocast():
            logits = model(input_ids=ids, logits_to_keep=keep + 1, **inputs).logits
        # Position t predicts token t + 1; nothing follows the last.
        targets = ids[:, -keep:].masked_fill(mask[:, -keep:] == 0, IGNORED)
        return logp.log_probs(
            logits[:, -keep - 1 : -1],
            targets,
            temperature=self.temperature,
            ignore_index=IGNORED,
            return_entropy=True,
        )

    def _without_logits(
        self, model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_scored` by ``ck.linear_logp``, which does not round logits and keeps none."""
        with self.accelerator.autocast():
            return token_logps(
                model,
                ids,
                attention_mask=mask,
                last=keep,
                temperature=self.temperature,
                return_entropy=True,
                order=head_order(model),
            )


@contextlib.contextmanager
def _without_fused_head(cls: type) -> Iterator[None]:
    """Keep TRL from putting a head of its own around models' forwards, which nothing here calls.

    What `ck.patch` exchanges would not be called from under it.
    """
    trainer = next(c for c in cls.__mro__ if c.__name__ == "GRPOTrainer")
    module = sys.modules[trainer.__module__]
    add = _setting(trainer.__module__, module, _FUSED_HEAD)
    setattr(module, _FUSED_HEAD, lambda model, **options: None)
    try:
        yield
    finally:
        setattr(module, _FUSED_HEAD, add)


def _drop_autocast(reference: torch.nn.Module) -> None:
    """Remove the forward that accelerate put around a reference's: scoring enters autocast."""
    forward = vars(reference).pop("_original_forward", None)
    if forward is not None:
        del reference.forward
        if getattr(forward, "__func__", None) is not type(reference).forward:
            reference.forward = forward


def head_order(model: torch.nn.Module) -> str:
    """Order of summation of a patched causal LM's head."""
    head = causal_lm.head(causal_lm.unwrapped(model)[1]).module
    return getattr(vars(head).get(NOTES), "order", "chain")


# ---- generation ---------------------------------------------------------------------------------


class Draws:
    """Log-probability of each token that `generate` draws, by the rows that it is drawn from.

    A token is known when the next call of the model brings it: one step's rows are kept.
    """

    def __init__(
        self,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        read: Callable[[object], torch.Tensor],
    ):
        """Create a record.

        Args:
            score: (rows [B, D], tokens [B]) -> log p [B].
            read: What the model returned -> rows [B, D], of its last position.
        """
        self.score, self.read = score, read
        self.rows: torch.Tensor | None = None
        self.tokens: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    @contextlib.contextmanager
    def recording(self, model: torch.nn.Module) -> Iterator[None]:
        """Record the calls of a model."""
        handle = model.register_forward_hook(self._called, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _called(self, module: torch.nn.Module, args: tuple, inputs: dict, output: object) -> None:
        if self.rows is not None:
            self._score(inputs["input_ids"][:, -1])
        self.rows = self.read(output)

    def _score(self, tokens: torch.Tensor) -> None:
        self.tokens.append(tokens)
        self.scores.append(self.score(self.rows, tokens))

    @torch.no_grad()
    def logps(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of each completion, as TRL cut it.

        Raises:
            ArgumentValueError: the calls of the model were not one for each token.
        """
        want = "one call of the model for each token of each prompt"
        width = max(map(len, completions), default=0)
        if self.rows is None or width > len(self.tokens) + 1 or len(self.rows) != len(completions):
            raise ArgumentValueError(expected("generation_kwargs", want, "another number"))
        if width == len(self.tokens) + 1:
            last = [c[-1] if len(c) == width else IGNORED for c in completions]
            self._score(torch.tensor(last, dtype=torch.int64, device=self.rows.device))
        tokens, scores = (torch.stack(t, 1).tolist() for t in (self.tokens, self.scores))
        for drawn, completion in zip(tokens, completions, strict=True):
            if drawn[: len(completion)] != completion:
                raise ArgumentValueError(expected("generation_kwargs", want, "other tokens"))
        return [row[: len(c)] for row, c in zip(scores, completions, strict=True)]


class _Batches:
    """Completions of ``generate_batch``, with the log-probabilities that it returned."""

    def __init__(self, generate_batch: Callable):
        self.generate_batch = generate_batch
        self.drawn: list[tuple[list[int], list[float]]] = []

    def __call__(
        self, *args: object, continuous_batching_config: object = None, **kwargs: object
    ) -> dict[str, object]:
        """Method of the model, in place of its own."""
        config = copy.copy(continuous_batching_config)
        config.return_logprobs = True
        outputs = self.generate_batch(*args, continuous_batching_config=config, **kwargs)
        for output in outputs.values():
            if output.error is not None:
                want = "completions of all prompts"
                raise ArgumentValueError(expected("generate_batch", want, output.error))
            self.drawn.append((list(output.generated_tokens), list(output.logprobs)))
        return outputs

    def logps(self, completions: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of the completions.

        Raises:
            ArgumentValueError: they are others than were drawn.
        """
        tokens = [drawn for drawn, _ in self.drawn]
        if tokens != [list(c) for c in completions]:
            want = "the completions of generate_batch"
            raise ArgumentValueError(expected("completions", want, "others"))
        return [scores for _, scores in self.drawn]


@contextlib.contextmanager
def _batched(model: torch.nn.Module) -> Iterator[_Batches]:
    """Ask ``generate_batch`` for log-probabilities, and record them."""
    batches = _Batches(model.generate_batch)
    vars(model)["generate_batch"] = batches
    try:
        yield batches
    finally:
        del vars(model)["generate_batch"]


# ---- contracts ----------------------------------------------------------------------------------


def contracts_in_use(device: torch.device | str) -> dict[str, str]:
    """Return the contract ids of the ops that ran on a device in this process so far.

    Call it once the model has generated a token and ``ck.log_probs`` has scored it.  An op that ran
    in dtypes with several ids has them all, in their order, with "and" between.

    Args:
        device: Where they ran, such as ``"cuda:0"``; ``"cuda"``: on any of them.

    Returns:
        Op -> id; what JSON can hold.
    """
    return process_contract.ids_that_ran(device)


def require_same_contracts(trainer: Mapping[str, str], rollout: Mapping[str, str]) -> None:
    """Check that both sides run the same ops, under the same contracts.

    Args:
        trainer, rollout: Op -> contract id, as `contracts_in_use` gives them on either side.

    Raises:
        ContractError: an op has another id on one side, or is missing there, as it is of a model
            that was not patched; the message has both ids of each.
        ArgumentTypeError: no mapping of strings.  ArgumentValueError: a side without any op.
    """
    _check_ids("trainer", trainer)
    _check_ids("rollout", rollout)
    differing = [
        f"  {op}: {trainer.get(op, 'not run')} in the trainer, {rollout.get(op, 'not run')} in "
        "the rollout"
        for op in sorted(trainer.keys() | rollout.keys())
        if trainer.get(op) != rollout.get(op)
    ]
    if differing:
        raise ContractError("\n".join(["trainer and rollout differ in their bits:", *differing]))


# ---- checks -------------------------------------------------------------------------------------


def _check_ids(name: str, ids: object) -> None:
    if not isinstance(ids, Mapping) or not all(isinstance(s, str) for p in ids.items() for s in p):
        want = "a mapping of ops to contract ids"
        raise ArgumentTypeError(expected(name, want, type(ids).__name__))
    if not ids:
        raise ArgumentValueError(expected(name, "the contract id of at least one op", "none"))


def _check_method(method: object, name: str) -> None:
    _, *names = inspect.getfullargspec(getattr(SampledLogps, name)).args  # without self
    theirs = list(inspect.signature(method).parameters) if callable(method) else []
    if theirs[: len(names)] != names:
        _refuse_trainer(f"{name}({', '.join(names)}, ...)", f"TRL {_version()}")


def _refuse_trainer(part: str, actual: str) -> None:
    want = f"trl.GRPOTrainer of a version like {TESTED}, with {part}"
    raise ArgumentTypeError(expected("the base after SampledLogps", want, actual))


def _version() -> str:
    return getattr(sys.modules.get("trl"), "__version__", "none")


def _setting(label: str, holder: object, name: str) -> object:
    """Return a setting; refuse a missing one: it may be on under another name."""
    if not hasattr(holder, name):
        want = f"a setting, as TRL {TESTED} has it"
        raise ArgumentTypeError(expected(label, want, f"none in TRL {_version()}"))
    return getattr(holder, name)


def _check_off(label: str, holder: object, name: str) -> None:
    if value := _setting(label, holder, name):
        want = "off, as the log-probabilities are those of the model's own logits"
        raise ArgumentValueError(expected(label, want, value))
