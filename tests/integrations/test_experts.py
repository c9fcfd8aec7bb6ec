"""``experts_implementation="cute_kernels"`` in small mixtures of experts, and its refusals."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError
from cute_kernels.integrations import experts as interface
from cute_kernels.integrations import transformers as ours
from tests.contract import same_bytes
from tests.integrations.moe_models import KINDS, LENGTH, WIDTH, model_of, tokens


@pytest.fixture(autouse=True, scope="module")
def registered():
    ours.register()
    ours.register()


EAGER = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
#: By day experts with biases and a gate of their own; test_mixtures.py decodes a Qwen3-MoE.
BY_DAY = ("gpt_oss",)
ALL = [*BY_DAY, *(pytest.param(k, marks=pytest.mark.nightly) for k in KINDS if k not in BY_DAY)]


@pytest.mark.parametrize("kind", ALL)
def test_rows_of_a_model(kind):
    """Alone, in a batch, padded on the left and decoded: the same bytes."""
    model, ids = model_of(kind), tokens()
    ck.patch(model)
    with torch.no_grad(), ck.batch_invariant():
        whole = model(ids).logits
        for i in range(3):
            assert same_bytes(model(ids[i : i + 1]).logits, whole[i : i + 1])
        pad = torch.zeros(3, 5, dtype=torch.int64)
        mask = torch.cat([pad, torch.ones_like(ids)], 1)
        at = (mask.cumsum(1) - 1).clamp(min=0)
        padded = model(torch.cat([pad, ids], 1), attention_mask=mask, position_ids=at)
        padded = padded.logits[:, 5:]
        assert same_bytes(padded, whole)
        step = model(ids[:1, :17], use_cache=True)
        rows, cache = [step.logits], step.past_key_values
        for t in range(17, LENGTH):
            step = model(ids[:1, t : t + 1], past_key_values=cache, use_cache=True)
            rows.append(step.logits)
            cache = step.past_key_values
        assert same_bytes(torch.cat(rows, 1), whole[:1])
    assert "grouped_gemm" in {run["kernel"] for run in ck.info()["ran"]}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind):
    """Logits and gradients are those of eager experts in fp32, within the rounding of bf16."""
    exact, model = model_of(kind, **EAGER).float(), model_of(kind)
    exact.load_state_dict(model.state_dict())
    ids = tokens()
    want = exact(ids, labels=ids)
    with ck.batch_invariant():
        got = model(ids, labels=ids)
    assert (got.logits.float() - want.logits).norm() <= 0.05 * want.logits.norm()
    want.loss.backward()
    got.loss.backward()
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert len(names) >= 4
    parameters, exact_parameters = dict(model.named_parameters()), dict(exact.named_parameters())
    for name in names:
        grad, exact_grad = parameters[name].grad.float(), exact_parameters[name].grad
        assert (grad - exact_grad).norm() <= 0.15 * exact_grad.norm(), name


def test_refused_by_name():
    x, index, weights = torch.randn(4, WIDTH).bfloat16(), torch.zeros(4, 1).long(), torch.ones(4, 1)
    module = model_of("gpt_oss").model.layers[0].mlp.experts
    with pytest.raises(ArgumentValueError, match=r"module\._apply_gate.*batch_invariant"):
        module(x, index, weights)
    with ck.batch_invariant():
        assert module(x, index, weights).shape == x.shape
    module = model_of("mixtral").model.layers[0].mlp.experts
    module._is_expert_parallel = True
    with pytest.raises(ArgumentValueError, match="experts cut over ranks"):
        module(x, index, weights)
    module._is_expert_parallel, module.has_post_expert_norm = False, True
    with pytest.raises(ArgumentValueError, match="without a norm"):
        module(x, index, weights)
    with pytest.raises(ArgumentTypeError, match="use_experts_implementation, got Linear"):
        interface.experts(torch.nn.Linear(2, 2), x, index, weights)
