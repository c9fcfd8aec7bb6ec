"""A Hugging Face model whose log-probs are the same in rollout and in training.

    python examples/patched_model.py

Rollout decodes one sequence token by token with a cache; training runs a padded batch in one pass.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cute_kernels as ck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Sizes at which stock torch should differ: on a GPU it did not at a width of 128.
WIDTH, ROWS, LENGTH, VOCABULARY = (2048, 16, 256, 97) if DEVICE == "cuda" else (128, 8, 48, 97)


def decode(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits of one sequence, token by token."""
    cache, logits = None, []
    for token in ids.split(1, dim=1):
        out = model(token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """The number of elements whose bytes differ."""
    return int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())


@torch.no_grad()
def main() -> int:
    torch.manual_seed(0)
    heads = {"num_attention_heads": WIDTH // 64, "num_key_value_heads": WIDTH // 128}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **heads, **sizes))
    model = model.to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, LENGTH - 8 :] = 0  # a batch padded on the right

    def count() -> int:
        training = model(ids, attention_mask=mask).logits[:1, : LENGTH - 8]
        return differing(decode(model, ids[:1, : LENGTH - 8]), training)

    before = count()
    ck.patch(model, strict=True)
    after, total = count(), (LENGTH - 8) * VOCABULARY
    print(f"{DEVICE}: of {total} logits differ between rollout and training: torch {before}")
    print(f"after ck.patch(model): {after}")
    return 1 if after else 0


if __name__ == "__main__":
    sys.exit(main())
