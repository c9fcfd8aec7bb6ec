"""SGLang's engine on a CPU beside the patched trainer.

    python -m tests.integrations.sglang_engine FOLDER OUT

FOLDER gets a random Llama, OUT a JSON object of counts.  CUTE_KERNELS_SGLANG decides whose kernels
run.  Prompts are drawn from in one batch, their prefill in chunks of 64, and one of them alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

LENGTHS, NEW, VOCAB = (5, 17, 70, 120), 6, 1024


def save_model(folder: Path) -> None:
    """Write a Llama, 512 wide, whose log-probs are neither flat nor certain."""
    from perf.rl.llama import random_llama

    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads"
    sizes = dict(zip(names.split(), (512, 768, 2, 4), strict=True))
    random_llama(VOCAB, 256, num_key_value_heads=2, **sizes).save_pretrained(folder)


def log_probs(output: dict) -> torch.Tensor:
    """The log-probs of drawn tokens."""
    return torch.tensor([entry[0] for entry in output["meta_info"]["output_token_logprobs"]])


def main(folder: Path, out: Path) -> None:
    """Draw, score what was drawn, and count."""
    import sglang
    import transformers

    import cute_kernels as ck
    from cute_kernels import settings
    from cute_kernels.integrations.transformers import token_logps

    save_model(folder)
    ours = settings.get("SGLANG") == "1"
    engine = sglang.Engine(
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        attention_backend="cute_kernels" if ours else "torch_native",
        page_size=64 if ours else 1,
        chunked_prefill_size=64,
        max_total_tokens=1024,
        mem_fraction_static=0.3,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
    )
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (n,), generator=draw).tolist() for n in LENGTHS]
    sampling = {"max_new_tokens": NEW, "temperature": 0, "ignore_eos": True}
    options = {"sampling_params": sampling, "return_logprob": True}
    outputs = engine.generate(input_ids=prompts, **options)
    alone = log_probs(engine.generate(input_ids=prompts[1], **options))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    ck.patch(model, strict=True)
    counts = {"count": 0, "differ": 0, "largest": 0.0}
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, theirs = output["output_ids"], log_probs(output)
        with torch.no_grad():
            mine = token_logps(model, torch.tensor([prompt + tokens]))[0, -len(tokens) :]
        counts["count"] += len(tokens)
        counts["differ"] += int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())
        counts["largest"] = max(counts["largest"], float((mine - theirs).abs().max()))
    batched = log_probs(outputs[1])
    counts["alone_differ"] = int((alone.view(torch.int32) != batched.view(torch.int32)).sum())
    out.write_text(json.dumps(counts))
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
