"""One process of vLLM: each case alone, batched with preemption, from the prefix cache, in chunks.

    python -m tests.integrations.vllm.engine FOLDER OUT CASE...

FOLDER has the models of `cases.save`.  OUT gets a JSON line for each prompt of each run: its tokens
and the bytes of their log-probs.  CUTE_KERNELS_VLLM decides whose kernels run.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from perf.core.bits import fp32_bits
from perf.rl.engine import sampled

#: Set by who starts this process; one thread, as the number of threads is part of a CPU's bits.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def start(path: Path, **options: object):
    """Return an engine of a folder."""
    from vllm import LLM

    from tests.integrations.vllm import cases

    defaults = {"skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0}
    defaults |= {"block_size": cases.PAGE, "enforce_eager": True}
    return LLM(model=str(path), **defaults | options)


def line_of(name: str, what: str, number: int, output) -> dict[str, object]:
    """Return what a run drew for a prompt, and the bytes of the log-probs."""
    ((tokens, bits),) = sampled([output])
    return {"case": name, "run": what, "prompt": number, "tokens": tokens, "bits": bits}


def run(name: str, folder: Path, write) -> None:
    """All runs of one case in one engine."""
    import torch
    from vllm import SamplingParams, TokensPrompt
    from vllm.v1.core.sched.scheduler import Scheduler

    from tests.integrations.vllm import cases

    case = cases.CASES[name]
    longest = max(case.lengths) + cases.NEW_TOKENS
    llm = start(
        folder / name,
        max_model_len=-(-longest // cases.PAGE) * cases.PAGE,
        max_num_seqs=len(case.lengths),
        max_num_batched_tokens=64,
        num_gpu_blocks_override=case.pages,
        enable_prefix_caching=True,
        logprobs_mode=case.logprobs_mode,
        # A card may have other engines, and what the last one of this process has left.
        **({"gpu_memory_utilization": 0.2} if torch.cuda.is_available() else {}),
    )
    preempted = []
    preempt = Scheduler._preempt_request

    def counted(self, request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = counted
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in cases.prompts(name)]

    drawn = []

    def generate(indices: list[int], what: str) -> None:
        # No seeds: vLLM cannot rewind the generators of a CPU for the chunks of a prefill.
        params = SamplingParams(
            temperature=case.temperature,
            max_tokens=cases.NEW_TOKENS,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
        )
        preempted.clear()
        outputs = llm.generate([prompts[i] for i in indices], params, use_tqdm=False)
        for i, output in zip(indices, outputs, strict=True):
            line = line_of(name, what, i, output)
            line |= {"preempted": len(preempted), "cached": output.num_cached_tokens}
            write(line)
            drawn.append(line)

    def score(budget: int) -> None:
        """Log-probs of what was drawn first, as rows of a prompt, in steps of ``budget`` tokens."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.max_num_scheduled_tokens = budget
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        for line in drawn[: len(prompts)]:
            ids = prompts[line["prompt"]]["prompt_token_ids"] + line["tokens"]
            llm.reset_prefix_cache()
            given = TokensPrompt(prompt_token_ids=ids)
            (output,) = llm.generate([given], params, use_tqdm=False)
            rows = zip(line["tokens"], output.prompt_logprobs[-len(line["tokens"]) :], strict=True)
            bits = fp32_bits([row[token].logprob for token, row in rows])
            write(line | {"run": f"chunks of {budget}", "bits": bits})

    everyone = list(range(len(prompts)))
    for i in everyone:
        llm.reset_prefix_cache()
        generate([i], "alone")
    llm.reset_prefix_cache()
    generate(everyone, "batched")
    generate(everyone[-1:], "cached")
    for budget in case.budgets:
        score(budget)
    Scheduler._preempt_request = preempt


def main() -> None:
    """Run the cases of the command line, one after the other."""
    folder, out, *names = sys.argv[1:]
    from vllm.distributed import cleanup_dist_env_and_memory

    with open(out, "w") as file:

        def write(line: dict) -> None:
            print(json.dumps(line), file=file, flush=True)

        for name in names:
            run(name, Path(folder), write)
            gc.collect()
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
