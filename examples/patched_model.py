"""A Hugging Face model whose log-probs are the same in rollout and in training.

    python examples/patched_model.py

Rollout decodes one sequence token by token with a cache; training runs a padded batch in one pass.
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cute_kernels as ck

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=97, num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(97, (8, 48), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, 40:] = 0  # a batch padded on the right

    def count() -> int:
        training = model(ids, attention_mask=mask).logits
        return differing(decode(model, ids[:1, :40]), training[:1, :40])

    before = count()
    ck.patch(model, strict=True)
    after = count()
    print(f"{DEVICE}: logits of {40 * 97} that differ between rollout and training: torch {before}")
    print(f"after ck.patch(model): {after}")
    return 1 if after else 0


if __name__ == "__main__":
    sys.exit(main())
