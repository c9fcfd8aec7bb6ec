"""A Llama of transformers as it comes, nothing patched: alone, in batches, padded, with a cache."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes

transformers = pytest.importorskip("transformers")
families = pytest.importorskip("tests.model.patch.families")

LENGTH, TOKENS = 29, 160


def llama(attention: str = "sdpa"):
    sizes = {"vocab_size": TOKENS, "intermediate_size": 272, "head_dim": 32}
    return families.model("llama", **sizes, attn_implementation=attention)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def mode():
    return ck.batch_invariant(strict=True)


def padded(ids: torch.Tensor, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) [2, T]: the first row among padding, the second one full."""
    length = before + LENGTH + after
    both = torch.randint(TOKENS, (2, length), generator=torch.Generator().manual_seed(2))
    mask = torch.ones(2, length, dtype=torch.int64)
    both[0, before : before + LENGTH] = ids
    mask[0, :before] = mask[0, before + LENGTH :] = 0
    return both, mask


@torch.no_grad()
def surroundings(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits [1, T, V] of the first row of ids in every way that a server meets it."""
    found = {"in a batch": model(ids).logits[:1], "in a pair": model(ids[:2]).logits[:1]}
    for name, before, after in (("left", 7, 0), ("right", 0, 11), ("both", 5, 3)):
        both, mask = padded(ids[0], before, after)
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        made = model(both, attention_mask=mask, position_ids=position).logits
        found[f"padded {name}"] = made[:1, before : before + LENGTH]
    cache = transformers.DynamicCache()
    parts = [model(ids[:1, :9], past_key_values=cache).logits]
    parts += [model(ids[:1, i : i + 1], past_key_values=cache).logits for i in range(9, LENGTH)]
    found["with a cache"] = torch.cat(parts, 1)
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_alone_and_in_any_surroundings(attention):
    """Eager attention adds over all columns of a batch: padding and caches are sdpa's promise."""
    model, ids = llama(attention), tokens(5)
    with mode():
        with torch.no_grad():
            alone = model(ids[:1]).logits
        found = surroundings(model, ids)
    for name, logits in found.items():
        if attention == "sdpa" or name in ("in a batch", "in a pair"):
            assert same_bytes(logits, alone), name


def test_a_norm_that_follows_the_number_of_rows_shows_in_all_of_them():
    model, ids = llama(), tokens(5)

    def by_rows(module, given, made):
        return made if made[..., 0].numel() == LENGTH else made * (1 + 2.0**-7)

    model.model.norm.register_forward_hook(by_rows)
    with mode():
        with torch.no_grad():
            alone = model(ids[:1]).logits
        found = surroundings(model, ids)
    assert len(found) == 6
    assert not any(same_bytes(logits, alone) for logits in found.values())


def test_the_logits_are_those_of_torch():
    model, ids = llama(), tokens(2)
    with torch.no_grad():
        want = model.double()(ids).logits
        with mode():
            got = model.to(torch.bfloat16)(ids).logits
    assert (got.double() - want).abs().max() < 0.04 * want.abs().max()


def test_gradients_of_embeddings_keep_their_bits():
    """Of inputs_embeds: rows of a batch are rows of the gradient."""
    model, ids = llama(), tokens(3)
    embeds = model.get_input_embeddings()(ids).detach()

    def gradient(part: torch.Tensor) -> torch.Tensor:
        leaf = part.clone().requires_grad_()
        with mode():
            logits = model(inputs_embeds=leaf).logits
            logits.backward(torch.ones_like(logits))
        return leaf.grad

    whole = gradient(embeds)
    alone = torch.cat([gradient(row[None]) for row in embeds])
    assert same_bytes(whole, alone) and whole.abs().max() > 0


def test_a_training_step_is_the_same_twice_and_in_strict():
    def step() -> list[torch.Tensor]:
        model = llama().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mode():
            loss = model(tokens(3), labels=tokens(3)).loss
            loss.backward()
        optimizer.step()
        return [loss.detach(), *(p.detach() for p in model.parameters())]

    first, second = step(), step()
    assert all(map(same_bytes, first, second)) and first[0].isfinite()


def test_generation_is_the_same_alone_and_padded():
    model, ids = llama(), tokens(1)
    both, mask = padded(ids[0], 6, 0)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with mode():
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        batch = model.generate(both, attention_mask=mask, **options)
    assert alone[0, LENGTH:].tolist() == batch[0, both.shape[1] :].tolist()
