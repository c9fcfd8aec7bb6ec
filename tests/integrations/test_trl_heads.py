"""TRL's SFT, DPO and KTO trainers put a head of their own around a model: what is said of it."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.logp import api

INSTALL = "is not installed: pip install -c constraints.txt '.[trl]'"
pytest.importorskip("transformers")
trl = pytest.importorskip("trl", reason=f"trl {INSTALL}")
from tests.integrations import trl_step  # noqa: E402

WORDS = [" ".join(f"w{i}" for i in range(first, first + 9)) for first in (3, 14, 25, 36)]
ROWS = {
    "SFT": [{"text": words} for words in WORDS],
    "DPO": [{"prompt": w, "chosen": "w50 w51 w52", "rejected": "w60 w61"} for w in WORDS],
    "KTO": [{"prompt": w, "completion": w[-7:], "label": w < "w2"} for w in WORDS],
}


def trainer(name: str, path, folder):
    settings = {"per_device_train_batch_size": 4, "max_steps": 1, "report_to": []}
    settings |= {"use_cpu": True, "bf16": False, "save_strategy": "no"}
    return getattr(trl, f"{name}Trainer")(
        model=trl_step.load(path),
        args=getattr(trl, f"{name}Config")(output_dir=str(folder), **settings),
        train_dataset=trl_step.dataset(ROWS[name]),
        processing_class=trl_step.tokenizer(),
    )


def claims_the_loss(report) -> bool:
    return any(one.by == "ck.linear_logp" for one in report.replaced)


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The shapes of hidden states that ``ck.linear_logp`` is called with."""
    found, theirs = [], api.linear_logp

    def counted(hidden, *args, **options):
        found.append(tuple(hidden.shape))
        return theirs(hidden, *args, **options)

    monkeypatch.setattr(api, "linear_logp", counted)
    return found


@pytest.mark.parametrize("name", ROWS)
def test_the_report_claims_what_runs(name, path, tmp_path, calls):
    """One step is run, and the ops of it are compared with the report."""
    one = trainer(name, path, tmp_path)
    one.train()
    assert one.state.global_step == 1 and not calls
    report = ck.patch(one.model)
    assert not claims_the_loss(report) and not report.complete
    left = {part.part: part.known for part in report.moving}
    assert "trl.trainer.utils._fused_forward" in left["LlamaForCausalLM: loss"]
    with pytest.raises(PatchError, match="_fused_forward"):
        ck.patch(one.model, strict=True)
    # Without TRL's head forward(labels=) is ours, and the report says so.
    vars(one.model).pop("forward")
    assert claims_the_loss(ck.patch(one.model, strict=True))
    ids = torch.tensor([[3, 4, 5, 6]])
    one.model(input_ids=ids, labels=ids).loss.backward()
    assert calls == [(1, 4, 128)]
