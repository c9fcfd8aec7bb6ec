"""transformers' Trainer with an optimizer that reads ``main_grad``: the documentation's block."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations import main_grad
from tests.contract import same_bytes
from tests.integrations.recipe import run_block
from tests.model.patch import families

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install '.[trl]'")
import transformers

HEADING = "An optimizer that reads main_grad, under the Trainer"
ROWS, LENGTH = 16, 64


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    families.model("llama").save_pretrained(folder)
    return folder


def run(path, folder, accumulation: int, **changed: object) -> dict:
    """The block's names after it ran."""
    ids = families.ids(ROWS * 2, LENGTH)
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        save_strategy=changed.pop("save_strategy", "no"),
        save_steps=1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_grad_norm=0.0,
        seed=3,
        lr_scheduler_type="constant",
    )
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    names = {"model": model, "dataset": rows, "settings": settings, **changed}
    names = run_block("docs/integrations.md", HEADING, ck=ck, transformers=transformers, **names)
    names["trainer"].train()
    return names


def test_weights_do_not_depend_on_the_accumulation(path, tmp_path):
    before = families.model("llama").state_dict()
    runs = {n: run(path, tmp_path / str(n), n) for n in (1, 2, 4)}
    assert ROWS // 4 * LENGTH % runs[1]["report"].granularity == 0
    assert not runs[1]["report"].main_grad_shared
    weights = {n: names["model"].state_dict() for n, names in runs.items()}
    for name, weight in weights[1].items():
        assert not same_bytes(weight, before[name]), name
        assert same_bytes(weight, weights[2][name]) and same_bytes(weight, weights[4][name]), name
    for one in runs.values():
        masters = one["optimizer"].masters
        wanted = runs[1]["optimizer"].masters
        assert all(same_bytes(m, o) for m, o in zip(masters, wanted, strict=True))
        assert all(p.grad is None and not p.main_grad.any() for p in one["model"].parameters())


def test_a_step_sees_the_whole_gradient_clipped(path, tmp_path, monkeypatch):
    """The gradient's norm is above 1, as a run without ``max_norm`` shows."""
    seen = {}

    theirs = torch.optim.AdamW.step

    def spied(self, closure=None):
        grads = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        seen.setdefault("norm", torch.stack([g.double().norm() for g in grads]).norm().item())
        return theirs(self, closure)

    monkeypatch.setattr(torch.optim.AdamW, "step", spied)
    run(path, tmp_path / "clipped", 2)
    assert seen.pop("norm") == pytest.approx(1.0, rel=1e-3)
    monkeypatch.setattr(main_grad, "clip_grad_norm_", lambda *a: None)
    run(path, tmp_path / "whole", 2)
    assert seen["norm"] > 2


def test_masters_are_in_the_checkpoint(path, tmp_path):
    names = run(path, tmp_path, 2, save_strategy="steps")
    want = [m.clone() for m in names["optimizer"].masters]
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert all(same_bytes(a, b) for a, b in zip(saved["masters"], want, strict=True))
    fresh = main_grad.MainGradAdamW(names["model"].parameters(), max_norm=1.0, lr=1e-3)
    fresh.load_state_dict(saved)
    assert all(same_bytes(a, b) for a, b in zip(fresh.masters, want, strict=True))
    kept = names["optimizer"].state_dict()["state"], fresh.state_dict()["state"]
    assert kept[0].keys() == kept[1].keys() and len(kept[0]) == len(want)
    for key, state in kept[0].items():
        assert all(same_bytes(state[n], kept[1][key][n]) for n in ("exp_avg", "exp_avg_sq"))
