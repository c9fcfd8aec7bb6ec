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
from tests.integrations.vllm.card import SMALL, WORK, say

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
        tensor_parallel_size=ranks,
        additional_config={"cute_kernels": {"order": ORDER}},
        disable_custom_all_reduce=True,
        worker_extension_cls=large.EXTENSION,
        **({"enforce_eager": True} if eager else {}),
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
    prefill = [logps[-NEW:] for _, logps in large.prompted(again)]
    contracts = llm.collective_rpc("cute_kernels_contract")
    torch.save({"pairs": pairs, "contracts": contracts}, WORK / f"ranks_{ranks}.pt")
    count, differ = compare([pairs[2]], [alone])
    say(stage, "alone_vs_batched", count=count, differ=differ)
    count, differ = compare(pairs[:4], [(p[0], x) for p, x in zip(pairs, prefill, strict=False)])
    say(stage, "decode_vs_prefill", count=count, differ=differ)
    say(stage, "done", seconds=round(time.time() - began, 1), batch_s=round(seconds, 3))
    llm.llm_engine.engine_core.shutdown()


def compare(one: list, other: list) -> tuple[int, int]:
    """Log-probs of two runs, and how many differ in tokens or in bytes."""
    count = differ = 0
    for (ids, logps), (others, theirs) in zip(one, other, strict=True):
        mine, yours = (torch.tensor(x, dtype=torch.float32) for x in (logps, theirs))
        same = mine.view(torch.int32) == yours.view(torch.int32)
        tokens = torch.tensor(ids)[-len(logps) :] == torch.tensor(others)[-len(logps) :]
        count += len(logps)
        differ += int((~(same & tokens)).sum())
    return count, differ


def run_trainer() -> None:
    """Compare the engines with each other and with a patched model of one rank."""
    import cute_kernels as ck
    from cute_kernels.errors import ContractError
    from cute_kernels.integrations.contract_exchange import require_engine

    files = {ranks: WORK / f"ranks_{ranks}.pt" for ranks in RANKS}
    runs = {ranks: torch.load(path) for ranks, path in files.items() if path.exists()}
    if len(runs) == len(RANKS):
        count, differ = compare(runs[1]["pairs"], runs[2]["pairs"])
        say("tp_trainer", "tp1_vs_tp2", count=count, differ=differ)
    model = large.load_trainer("llama", ORDER)
    score = large.score_with(model, ORDER)
    contract = ck.contract(model=model)
    for ranks, run in runs.items():
        count = differ = 0
        for part in large.grouped(run["pairs"]):
            count += part.logps.numel()
            differ += large.count_differing(part, score)
        try:
            require_engine(contract, run["contracts"])
            error = None
        except ContractError as caught:
            error = str(caught)
        numbers = {"count": count, "differ": differ, "contract_error": error}
        say("tp_trainer", "engine_vs_trainer", ranks=ranks, **numbers)
    chain = large.score_with(large.load_trainer("llama"))
    part = next(large.grouped(next(iter(runs.values()))["pairs"]))
    differ = large.count_differing(part, chain)
    say("tp_trainer", "control_of_another_order", count=part.logps.numel(), differ=differ)


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        run_trainer()
    else:
        run_engine(int(sys.argv[2]), sys.argv[3:] == ["eager"])
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
