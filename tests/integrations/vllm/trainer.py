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

#: What a line says of a sequence.
KEYS = ("case", "prompt", "tokens")


def score(
    name: str, folder: Path, rows: list[tuple[list[int], list[int]]], order: str
) -> list[list[float]]:
    """Log-probs of the tokens of each (prompt, tokens), from one batch padded on the left."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ck.patch(model.to(device).eval(), strict=True, order=order)
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
    ids, mask = ids.to(device), mask.to(device)
    with torch.no_grad():
        logps = token_logps(model, ids, attention_mask=mask, temperature=temperature, order=order)
    return [logps[i, -len(tokens) :].tolist() for i, (_, tokens) in enumerate(rows)]


def bits_of(name: str, folder: Path, lines: list[dict], order: str) -> list[list[int]]:
    """The trainer's bytes for each line of a case; equal sequences are scored once."""
    prompts = cases.prompts(name)
    keys = [(line["prompt"], tuple(line["tokens"])) for line in lines]
    unique = list(dict.fromkeys(keys))
    scores = score(name, folder, [(prompts[i], list(tokens)) for i, tokens in unique], order)
    bits = dict(zip(unique, map(fp32_bits, scores), strict=True))
    return [bits[key] for key in keys]


def main() -> None:
    """Score what was drawn, case by case."""
    folder, drawn, out = (Path(argument) for argument in sys.argv[1:4])
    lines = [json.loads(line) for line in drawn.read_text().splitlines()]
    with out.open("w") as file:
        for name in dict.fromkeys(line["case"] for line in lines):
            mine = [line for line in lines if line["case"] == name]
            for line, bits in zip(mine, bits_of(name, folder, mine, sys.argv[4]), strict=True):
                print(json.dumps({k: line[k] for k in KEYS} | {"bits": bits}), file=file)


if __name__ == "__main__":
    main()
