"""Steps of a policy gradient with a reference model: ratios of exactly 1, and a KL of exactly 0.

    python examples/policy_step.py

``model`` may be what wraps one: a DDP module, a DeepSpeed engine, a model under ``fully_shard``.
Over ranks, ``divisor`` is the number of tokens that count on all of them, over the ranks.
"""

import copy
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cute_kernels as ck
from cute_kernels.integrations.transformers import policy_loss, token_logps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, LENGTH, PROMPT, VOCABULARY = 4, 24, 8, 97


def main() -> int:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": VOCABULARY}
    model = LlamaForCausalLM(LlamaConfig(**heads, **sizes)).to(DEVICE, torch.bfloat16)
    reference = copy.deepcopy(model).eval()
    for each in (model, reference):
        ck.patch(each, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), device=DEVICE)
    advantages = torch.randn(ROWS, device=DEVICE)
    mask = torch.zeros(ROWS, LENGTH - 1, device=DEVICE)
    mask[:, PROMPT - 1 :] = 1  # tokens of the answers
    with torch.no_grad():
        # As a decoder scores: one sequence at a time.
        old = torch.cat([token_logps(model, row[None]) for row in ids])
        ref = token_logps(reference, ids)
    steps = []
    for _ in range(2):
        out = policy_loss(
            model, ids, loss="grpo", advantages=advantages, old_logp=old, mask=mask,
            reference_logp=ref, kl_weight=0.1, divisor=mask.sum(),
        )  # fmt: skip
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ratio = (out.logp - old)[mask != 0].exp()
        steps.append((bool((ratio == 1).all()), float(out.metrics.kl)))
    (on_policy, kl), (moved, later) = steps
    print(f"{DEVICE}: before the first step all ratios are exactly 1: {on_policy}, KL {kl}")
    print(f"after it they are not: {not moved}, KL {later:.2g}")
    return 0 if on_policy and kl == 0 and not moved and later > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
