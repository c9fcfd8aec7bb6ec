"""A tiny model, prompts of several lengths, and TRL's GRPOTrainer for one step on a CPU.

Prompts are padded on the left, completions, which end at several tokens, on the right.
"""

from __future__ import annotations

import torch
import transformers
import trl

import cute_kernels as ck
from cute_kernels.integrations import trl as integration
from cute_kernels.integrations.trl_loss import FusedLoss
from tests.contract import same_bytes
from tests.model.patch import families

PAD, EOS = 0, 1
TEMPERATURE, LONGEST = 0.7, 12
#: On a CPU torch's attention gives a token other bits from 32 columns on, which these have.
LENGTHS = (3, 17, 30, 41)
#: Any of these ends a completion, as random models rarely say one word.
ENDS = range(EOS, EOS + 8)


class Trainer(integration.SampledLogps, trl.GRPOTrainer):
    """Keeps what each micro-batch was learnt from, and the log-probabilities it was learnt with.

    unchecked: Whether a model that is not patched is taken, for a comparison.
    """

    def __init__(self, unchecked: bool = False, **given):
        super().__init__(**given)
        self.unchecked = unchecked
        self.batches: list[dict] = []
        self.learnt: list[torch.Tensor] = []

    def _require_patched(self):
        if not self.unchecked:
            super()._require_patched()

    def _compute_loss(self, model, inputs):
        self.batches.append(inputs)
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, *args, **given):
        made = super()._get_per_token_logps_and_entropies(*args, **given)
        if torch.is_grad_enabled():
            self.learnt.append(made[0].detach())
        return made


class FusedTrainer(FusedLoss, Trainer):
    """`Trainer` with `FusedLoss`: it keeps the log-probabilities that the loss was made of."""

    def _log_ratio(self, logps, inputs):
        self.batches.append(inputs)
        self.learnt.append(logps)
        super()._log_ratio(logps, inputs)


def tokenizer():
    """A word, an id."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, families.VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def checkpoint(folder, family: str = "llama"):
    """A random model on the disk, where TRL finds the reference."""
    families.model(family, eos_token_id=list(ENDS)).save_pretrained(folder)
    return folder


def prompts() -> list[dict[str, str]]:
    ids = torch.randint(2, families.VOCABULARY, (len(LENGTHS), max(LENGTHS))).tolist()
    pairs = zip(ids, LENGTHS, strict=True)
    return [{"prompt": " ".join(f"w{i}" for i in row[:length])} for row, length in pairs]


def dataset(rows: list[dict[str, str]]):
    import datasets

    return datasets.Dataset.from_list(rows)


def reward(completions: list[str], **_) -> list[float]:
    return [float(len(completion)) for completion in completions]


def settings(folder, **others: object):
    given = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 2,
        "max_completion_length": LONGEST,
        "temperature": TEMPERATURE,
        "beta": 0.1,
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
    }
    return trl.GRPOConfig(output_dir=str(folder), **given | others)


def load(path, patched: bool = True) -> torch.nn.Module:
    net = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if patched:
        ck.patch(net, strict=True)
    return net


def trainer(path, tokenizer, folder, cls=Trainer, patched: bool = True, **others):
    """One on the model of ``path``; ``others`` are of the trainer, and ``args`` of its settings."""
    torch.manual_seed(3)
    given = {
        "model": load(path, patched),
        "reward_funcs": reward,
        "args": settings(folder, **others.pop("args", {})),
        "train_dataset": dataset(prompts()),
        "processing_class": tokenizer,
    }
    made = cls(**given | others)
    if patched and made.ref_model is not None:
        ck.patch(made.ref_model)
    return made


def ratios(one: Trainer) -> torch.Tensor:
    """exp(new log p - old log p) of the tokens that count, of all micro-batches."""
    found = []
    for new, batch in zip(one.learnt, one.batches, strict=True):
        ratio = (new - batch["old_per_token_logps"]).exp()
        found.append(ratio[batch["completion_mask"].bool()])
    return torch.cat(found)


def all_ones(one: Trainer) -> bool:
    """Whether a trainer's ratios are many, and each exactly 1."""
    found = ratios(one)
    return found.numel() > 30 and bool((found == 1).all())


def check_on_policy(one: Trainer, micro_batches: int = 2) -> None:
    """Log-probs of the first step are the old ones and the reference's, and each ratio is 1."""
    assert len(one.batches) == len(one.learnt) >= micro_batches and all_ones(one)
    for batch, new in list(zip(one.batches, one.learnt, strict=True))[:micro_batches]:
        assert same_bytes(new, batch["old_per_token_logps"])
        assert same_bytes(new, batch["ref_per_token_logps"])


def rollout(one: Trainer) -> tuple[torch.Tensor, torch.Tensor]:
    """(old log p, those of the batch as it is learnt) of new completions, without a step."""
    one.model.train()
    batch = one._generate_and_score_completions(prompts())
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
    mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
    keep = batch["completion_ids"].shape[1]
    with torch.no_grad():
        new, *_ = one._get_per_token_logps_and_entropies(one.model, ids, mask, keep)
    counted = batch["completion_mask"].bool()
    return batch["old_per_token_logps"][counted], new[counted]
