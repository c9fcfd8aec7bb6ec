"""GPU time of the kernels of a decode step, by the number of sequences.

    python -m tests.integrations.vllm.gpu_sizes SYSTEM     a name for the records

CUTE_KERNELS_VLLM and VLLM_BATCH_INVARIANT in the environment decide whose kernels run.  A step's
time is a difference: completions of `LONG_RUN` tokens less those of `SHORT_RUN`, so that what the
prefill takes, and the steps that share a batch with it, are in both.  $SEQUENCES: the sizes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch

from perf.rl.engine import facts
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import SMALL, say

SIZES = tuple(
    int(n) for n in os.environ.get("SEQUENCES", "1,4" if SMALL else "1,64,256").split(",")
)
PROMPT, LONGEST = (20, 128) if SMALL else (1024, 2048)
SHORT_RUN, LONG_RUN = (3, 5) if SMALL else (24, 56)
REPEATS = 1 if SMALL else 3
TOP = 12


def kernel_times(call) -> dict[str, float]:
    """Kernel -> microseconds of all its launches in a call."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if large.ON_CARD else ProfilerActivity.CPU
    name = "self_device_time_total" if large.ON_CARD else "self_cpu_time_total"
    with profile(activities=[activity]) as run:
        call()
        if large.ON_CARD:
            torch.cuda.synchronize()
    return {e.key: getattr(e, name) for e in run.key_averages()}


def time_step(llm, prompts: list[list[int]]) -> tuple[dict[str, float], float]:
    """Microseconds of each kernel in a decode step, and of the step by the wall clock."""

    def run(new: int) -> None:
        large.generate(llm, prompts, new)

    steps = LONG_RUN - SHORT_RUN
    short, long = kernel_times(lambda: run(SHORT_RUN)), kernel_times(lambda: run(LONG_RUN))
    of_step = {key: (us - short.get(key, 0.0)) / steps for key, us in long.items()}
    times = [time.perf_counter()]
    for new in (SHORT_RUN, LONG_RUN):
        run(new)
        times.append(time.perf_counter())
    return of_step, 1e6 * (times[2] - 2 * times[1] + times[0]) / steps


def main(system: str) -> None:
    """Time the steps of each size."""
    began = time.time()
    llm = large.start("llama", max(SIZES), memory=0.6, max_model_len=LONGEST)
    vocab = large.config_of("llama").vocab_size
    say(system, "engine", seconds=round(time.time() - began, 1), **facts(llm))
    large.generate(llm, large.random_prompts(vocab, [PROMPT] * 2, 0), 4)
    for size in SIZES:
        prompts = large.random_prompts(vocab, [PROMPT] * size, size)
        large.generate(llm, prompts, SHORT_RUN)  # compiles what is left to compile
        steps = [time_step(llm, prompts) for _ in range(REPEATS)]
        totals = [sum(of_step.values()) for of_step, _ in steps]
        rows = [(round(us, 1), key[:60]) for key, us in steps[-1][0].items()]
        say(
            system,
            "decode_step",
            sequences=size,
            context=PROMPT + SHORT_RUN,
            kernels_us=[round(us, 1) for us in totals],
            median_us=round(statistics.median(totals), 1),
            wall_us=[round(wall) for _, wall in steps],
            top=sorted(rows, reverse=True)[:TOP],
        )
    say(system, "done", seconds=round(time.time() - began, 1))


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
