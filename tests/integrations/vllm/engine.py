"""One process of vLLM: each case alone, batched with preemption, from the prefix cache, in chunks.

    python -m tests.integrations.vllm.engine [--ranks | --MUTANT] FOLDER OUT CASE...

FOLDER has the models of `cases.save`.  OUT gets a JSON line for each prompt of each run: its tokens
and the bytes of their log-probs.  CUTE_KERNELS_VLLM decides whose kernels run.  --ranks: two
tensor-parallel ranks, in processes of vLLM's own, in one batch; the plug-in is asked for by
``additional_config``, and OUT with the suffix .contracts gets their contracts.  --MUTANT:
a mixture that is not the trainer's, which the bit tests have to see.  (Sums in another order differ
in fp32's last bit, which bf16 hides: they are killed by tests/integrations/test_engine_layers.py.)
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from perf.core.bits import fp32_bits
from perf.rl.engine import EXTENSION, sampled

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
    if not (folder / name).exists():
        cases.save(name, folder)
    longest = max(case.lengths) + cases.NEW_TOKENS
    llm = start(
        folder / name,
        max_model_len=-(-longest // case.page) * case.page,
        max_num_seqs=len(case.lengths),
        max_num_batched_tokens=case.budget,
        num_gpu_blocks_override=case.pages,
        enable_prefix_caching=case.caches,
        block_size=case.page,
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


def run_on_ranks(name: str, folder: Path, out: Path) -> None:
    """Draw from all prompts of a case in one batch, on two ranks."""
    from vllm import SamplingParams, TokensPrompt

    from tests.integrations.vllm import cases

    llm = start(
        folder / name,
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        tensor_parallel_size=2,
        additional_config={"cute_kernels": {"order": "tree"}},
        worker_extension_cls=EXTENSION,
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in cases.prompts(name)]
    parameters = SamplingParams(
        temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    lines = [json.dumps(line_of(name, "batched", i, output)) for i, output in enumerate(outputs)]
    out.write_text("\n".join(lines) + "\n")
    contracts = llm.collective_rpc("cute_kernels_contract")
    out.with_suffix(".contracts").write_text(json.dumps(contracts))


def combine_rounded_products() -> None:
    """Round each product to the dtype of the model, as transformers' own experts do."""
    from cute_kernels.moe import api as moe

    def combine(rows, weights, permutation):
        slots = zip(permutation.positions.unbind(1), weights.unbind(1), strict=True)
        return sum((rows[p.long()] * w[:, None]).to(rows.dtype) for p, w in slots)

    moe.combine = combine


def weights_in_another_dtype() -> None:
    """Round weights that stay in fp32, and keep those that are rounded."""
    from cute_kernels.integrations import engine_layers

    true = engine_layers.route
    engine_layers.route = lambda logits, k, rule: true(
        logits, k, rule._replace(rounded=not rule.rounded)
    )


def resume_without_inputs() -> None:
    """Begin behind a cached prefix without the last inputs of the convolution."""
    from cute_kernels.linear_attn.cache import LayerCache

    true = LayerCache.resume
    LayerCache.resume = lambda self, slots, length, inputs, state: true(
        self, slots, length, inputs * 0, state
    )


def steps_without_limits() -> None:
    """Leave the steps of a scan as they are, as vLLM does."""
    from cute_kernels.integrations.vllm import refusals

    refusals.step_limit = lambda config: (0.0, float("inf"))


def keep_states() -> None:
    """Begin a sequence with the state of the one that had its slot."""
    from cute_kernels.linear_attn.cache import LinearAttentionCache

    def reset(self, slots):
        for layer in self.layers:
            for counter in (layer.grid, layer.length, layer.conv_length):
                counter[slots] = 0

    LinearAttentionCache.reset = reset


MUTANTS = (
    combine_rounded_products, weights_in_another_dtype, resume_without_inputs, steps_without_limits,
    keep_states,
)  # fmt: skip


def main() -> None:
    """Run the cases of the command line, one after the other."""
    flags = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    folder, out, *names = [argument for argument in sys.argv[1:] if argument not in flags]
    if flags == ["--ranks"]:
        return run_on_ranks(names[0], Path(folder), Path(out))
    for mutant in MUTANTS:
        if f"--{mutant.__name__}" in flags:
            mutant()
    from vllm.distributed import cleanup_dist_env_and_memory

    with open(out, "w") as file:
        for name in names:
            run(name, Path(folder), lambda line: print(json.dumps(line), file=file, flush=True))
            gc.collect()
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
    from tests.integrations.vllm import processes

    processes.end()
