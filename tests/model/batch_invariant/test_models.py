"""Models of transformers as they come, nothing patched: alone, in batches, padded, with caches."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes
from tests.model.batch_invariant.cases import BF16, FP32

pytest.importorskip("transformers")
from tests.model.patch import all_causal_lms, families

#: Beyond one block of 128 keys; a window that is no multiple of anything.
WINDOW = 101


def model(family: str = "llama", dtype: torch.dtype = BF16, **settings: object) -> torch.nn.Module:
    sizes = {"hidden_size": 64, "head_dim": 32, "num_hidden_layers": 1}
    sizes |= {"max_position_embeddings": 512, "attn_implementation": "sdpa"}
    return families.model(family, **sizes | settings).to(dtype)


def mode():
    return ck.batch_invariant(strict=True)


@pytest.mark.parametrize(
    ("family", "dtype", "settings"),
    [
        ("llama", BF16, {"num_hidden_layers": 2}),
        ("mistral", BF16, {"sliding_window": WINDOW}),
        ("mistral", FP32, {"sliding_window": None}),
        pytest.param("mistral", FP32, {"sliding_window": WINDOW}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_sequence_has_its_bytes_in_any_surroundings(family, dtype, settings):
    """Logits, and the gradient of embeddings; windows, dynamic and static caches, padding."""
    net = model(family, dtype, **settings)
    with mode():
        assert all_causal_lms.differing(net) == []


def test_eager_attention_of_a_batch():
    """It adds over all columns: padding and caches are sdpa's promise."""
    net = model(attn_implementation="eager")
    with mode():
        assert not {"again", "in a batch", "gradient"} & {*all_causal_lms.differing(net)}


def test_a_norm_that_follows_the_number_of_rows_shows_in_all_of_them():
    net = model()

    def by_rows(module, args, out):
        rows = out[..., 0].numel()
        return out if rows == all_causal_lms.LENGTH else out * (1 + 2.0**-7)

    net.model.norm.register_forward_hook(by_rows)
    with mode():
        assert {*all_causal_lms.SURROUNDINGS} - {"again"} <= {*all_causal_lms.differing(net)}


def test_the_logits_are_those_of_torch():
    net, ids = model(), families.ids(2)
    want = families.logits(net.double(), ids)
    with mode():
        got = families.logits(net.to(BF16), ids)
    assert (got.double() - want).abs().max() < 0.04 * want.abs().max()


def test_a_training_step_is_the_same_twice_and_in_strict():
    steps, ids = [], families.ids(3)
    for _ in range(2):
        net = model().train()
        with mode():
            loss = net(ids, labels=ids).loss
            loss.backward()
        steps.append([loss.detach(), *(p.grad for p in net.parameters())])
    assert all(map(same_bytes, *steps)) and steps[0][0].isfinite()
