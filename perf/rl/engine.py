"""The rollout of one system: python -m perf.rl.engine WORK SYSTEM

One engine of vLLM draws all steps of a run.  CUTE_KERNELS_VLLM in the environment decides whose
kernels it runs: the plug-in holds for all engines of a process, so each system has its own.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ..core.bits import fp32_bits
from .size import Size, say

#: Of a process with vLLM on a machine without a network.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # else the sampler imports flashinfer, unguarded
    "PYTHONUNBUFFERED": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it uses NVLink multicast, which a shared host has not
}
#: More of one whose vLLM is built for CPUs.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # a CPU's bits depend on the number of threads
}
#: System -> variables of its engine.
SYSTEMS = {
    "native": {"CUTE_KERNELS_VLLM": "0"},
    "native_invariant": {"CUTE_KERNELS_VLLM": "0", "VLLM_BATCH_INVARIANT": "1"},
    "ours": {"CUTE_KERNELS_VLLM": "1"},
}
EXTENSION = "cute_kernels.integrations.contract_exchange.WorkerExtension"


def plugin_folder(folder: Path) -> Path:
    """A folder that makes the checkout's entry point known, as an installation does."""
    info = folder / "cute_kernels-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cute-kernels\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncute_kernels = cute_kernels.integrations.vllm.plugin:register\n"
    )
    return folder


def graphs(largest: int) -> dict[str, object]:
    """CUDA graphs of decode steps without torch.compile, for batches of up to so many sequences."""
    sizes = [2**i for i in range((largest - 1).bit_length() + 1)]
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}


def log_probs(completion) -> list[float]:
    """Log-probs of the tokens of one completion of vLLM."""
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [step[token].logprob for token, step in steps]


def sampled(outputs) -> list[tuple[list[int], list[int]]]:
    """(tokens, bytes of their log-probs) of each sequence that vLLM returned."""
    completions = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), fp32_bits(log_probs(one))) for one in completions]


def facts(llm) -> dict[str, object]:
    """Versions, runner, attention and graphs of an engine."""
    import torch
    import transformers
    import vllm

    config = llm.llm_engine.vllm_config

    def of_worker(worker) -> dict[str, object]:
        runner = worker.model_runner
        groups = [group for groups in runner.attn_groups for group in groups]
        return {
            "runner": type(runner).__module__,
            "attention": sorted({group.backend.get_name() for group in groups}),
            "norm": type(runner.model.model.norm).__module__,
        }

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "graphs": str(config.compilation_config.cudagraph_mode),
        "block": config.cache_config.block_size,
    } | llm.collective_rpc(of_worker)[0]


# ---- one system's rollout ------------------------------------------------------------------------


def start(size: Size, work: Path):
    """The engine of a run."""
    import torch
    import vllm

    on_card = {"gpu_memory_utilization": 0.5, "compilation_config": graphs(size.rows)}
    return vllm.LLM(
        model=str(work / "model"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=-(-(size.prompt + size.new) // 128) * 128,
        max_num_seqs=size.rows,
        enable_prefix_caching=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        tensor_parallel_size=size.ranks,
        seed=0,
        **(on_card if torch.cuda.is_available() else {"enforce_eager": True}),
    )


def prompts_of(size: Size, step: int) -> list[list[int]]:
    """Random prompts of a step, each as often as it is completed."""
    import torch

    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(3, size.vocab, (size.prompts, size.prompt), generator=draw).tolist()
    return [prompt for prompt in ids for _ in range(size.samples)]


def generate(llm, size: Size, prompts: list[list[int]], new: int) -> tuple[list, float]:
    """Completions of equal lengths, and the seconds that they took."""
    import vllm

    parameters = vllm.SamplingParams(
        temperature=size.temperature,
        max_tokens=new,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    requests = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in prompts]
    began = time.perf_counter()
    outputs = llm.generate(requests, parameters, use_tqdm=False)
    return outputs, time.perf_counter() - began


def load(llm, weights: Path) -> float:
    """Seconds in which all workers load version 1; cached keys and values go with the old one."""
    began = time.perf_counter()
    llm.collective_rpc("cute_kernels_load_published", args=(str(weights), 1))
    llm.reset_prefix_cache()
    return time.perf_counter() - began


def main(work: Path, system: str) -> None:
    """Draw the steps of a run; say what they took."""
    import torch

    size, began = Size.load(work), time.perf_counter()
    llm = start(size, work)
    say(work, system, "engine", seconds=[time.perf_counter() - began], **facts(llm))
    contracts = llm.collective_rpc("cute_kernels_contract")
    generate(llm, size, prompts_of(size, 0), min(size.new, 8))  # compiles what is left to compile
    seconds = []
    for step in range(size.steps):
        prompts = prompts_of(size, step + 1)
        outputs, took = generate(llm, size, prompts, size.new)
        seconds.append(took)
        completions = [output.outputs[0] for output in outputs]
        ids = [p + list(c.token_ids) for p, c in zip(prompts, completions, strict=True)]
        logps = torch.tensor([log_probs(c) for c in completions], dtype=torch.float32)
        torch.save({"ids": torch.tensor(ids), "logps": logps}, work / f"{system}_{step}.pt")
        say(work, system, "generate", seconds=seconds, contracts=contracts)
    say(work, system, "load", seconds=[load(llm, work / "weights")])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is timed
