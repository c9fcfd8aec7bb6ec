"""The trainer's side: log-probs of what an engine drew, in one padded batch of a patched model.

    python -m tests.integrations.vllm.trainer FOLDER DRAWN OUT ORDER

DRAWN is the output of `engine`; OUT gets its lines, with the bytes of `ck.linear_logp`.  ORDER: of
the model's products.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

import cute_kernels as ck
from cute_kernels.integrations.transformers import token_logps
from perf.core.bits import fp32_bits
from tests.integrations.vllm import cases


def score(
    name: str, folder: Path, rows: list[tuple[list[int], list[int]]], order: str
) -> list[list[float]]:
    """Log-probs of the tokens of each (prompt, tokens), from one batch padded on the left."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
    ck.patch(model.eval(), strict=True, order=order)
    longest = max(len(prompt) + len(tokens) for prompt, tokens in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (prompt, tokens) in enumerate(rows):
        sequence = torch.tensor(prompt + tokens)
        ids[i, longest - len(sequence) :] = sequence
        mask[i, longest - len(sequence) :] = 1
    case = cases.CASES[name]
    processed = case.logprobs_mode == "processed_logprobs" and case.temperature > 0
    temperature = case.temperature if processed else 1.0
    with torch.no_grad():
        logps = token_logps(model, ids, attention_mask=mask, temperature=temperature, order=order)
    return [logps[i, -len(tokens) :].tolist() for i, (_, tokens) in enumerate(rows)]


def main() -> None:
    """Score what was drawn, case by case; equal sequences once."""
    folder, drawn, out = (Path(argument) for argument in sys.argv[1:4])
    lines = [json.loads(line) for line in drawn.read_text().splitlines()]
    with out.open("w") as file:
        for name in dict.fromkeys(line["case"] for line in lines):
            prompts = cases.prompts(name)
            keys = [(e["prompt"], tuple(e["tokens"])) for e in lines if e["case"] == name]
            keys = list(dict.fromkeys(keys))
            rows = [(prompts[i], list(tokens)) for i, tokens in keys]
            scores = score(name, folder, rows, sys.argv[4])
            for (i, tokens), logps in zip(keys, scores, strict=True):
                line = {"case": name, "prompt": i, "tokens": tokens, "bits": fp32_bits(logps)}
                print(json.dumps(line), file=file)


if __name__ == "__main__":
    main()
