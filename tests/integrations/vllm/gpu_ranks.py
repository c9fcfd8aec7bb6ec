"""Two tensor-parallel ranks beside one, and both beside the trainer, in the order that ranks share.

    python -m tests.integrations.vllm.gpu_ranks engine RANKS [eager]
    python -m tests.integrations.vllm.gpu_ranks trainer

The engines draw the same tokens greedily if their log-probs have the same bytes.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from perf.rl.engine import facts
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import SMALL, WORK, say

RANKS = (1, 2)
ORDER = "tree"
LENGTHS = (5, 17, 70, 120) if SMALL else (5, 17, 100, 255, 257, 700, 1500, 3000) * 4 + (12000,) * 2
NEW = 4 if SMALL else 128


def run_engine(ranks: int, eager: bool) -> None:
    """Draw from all prompts in one batch, and from one alone; state the contract."""
    began = time.time()
    llm = large.start(
        "llama",
        64,
        eager=eager,
        tensor_parallel_size=ranks,
        additional_config={"cute_kernels": {"order": ORDER}},
        disable_custom_all_reduce=True,
        worker_extension_cls=large.EXTENSION,
    )
    stage = f"tp{ranks}"
    say(stage, "engine", seconds=round(time.time() - began, 1), eager=eager, **facts(llm))
    prompts = large.random_prompts(large.config_of("llama").vocab_size, LENGTHS, 5)
    large.generate(llm, prompts[:2], 4)
    start = time.perf_counter()
    outputs = large.generate(llm, prompts, NEW)
    seconds = time.perf_counter() - start
    pairs = large.decoded(outputs)
    alone = large.decoded(large.generate(llm, prompts[2:3], NEW))[0]
    again = large.generate(llm, [ids for ids, _ in pairs[:4]], 1, prompt_logprobs=0)
    contracts = llm.collective_rpc("cute_kernels_contract")
    torch.save({"pairs": pairs, "contracts": contracts}, WORK / f"ranks_{ranks}.pt")
    say(stage, "alone_vs_batched", **large.compare([pairs[2]], [alone]))
    say(stage, "decode_vs_prefill", **large.compare(pairs[:4], large.prompted(again)))
    say(stage, "done", seconds=round(time.time() - began, 1), batch_s=round(seconds, 3))
    llm.llm_engine.engine_core.shutdown()


def run_trainer() -> None:
    """Compare the engines with each other and with a patched model of one rank."""
    import cute_kernels as ck
    from cute_kernels.errors import ContractError
    from cute_kernels.integrations.contract_exchange import require_engine

    files = {ranks: WORK / f"ranks_{ranks}.pt" for ranks in RANKS}
    runs = {ranks: torch.load(path) for ranks, path in files.items() if path.exists()}
    if len(runs) == len(RANKS):
        say("tp_trainer", "tp1_vs_tp2", **large.compare(runs[1]["pairs"], runs[2]["pairs"]))
    model = large.load_trainer("llama", ORDER)
    score = large.score_with(model, order=ORDER)
    contract = ck.contract(model=model)
    for ranks, run in runs.items():
        counts = large.count_differing(large.grouped(run["pairs"]), score)
        try:
            require_engine(contract, run["contracts"])
            error = None
        except ContractError as caught:
            error = str(caught)
        counts["contract_error"] = error
        say("tp_trainer", "engine_vs_trainer", ranks=ranks, **counts)
    chain = large.score_with(large.load_trainer("llama"))
    part = next(large.grouped(next(iter(runs.values()))["pairs"]))
    say("tp_trainer", "control_of_another_order", **large.count_differing([part], chain))


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        run_trainer()
    else:
        run_engine(int(sys.argv[2]), sys.argv[3:] == ["eager"])
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
