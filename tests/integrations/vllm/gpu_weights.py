"""Weights that change under captured CUDA graphs: python -m tests.integrations.vllm.gpu_weights

One engine, and the trainer in the same process.  Versions are published, loaded between calls of
`generate` and scored; at last weights are written by `load_weights`, without the disk.  After each
change log-probs have the bytes of the trainer with the new weights, and the graphs are those that
were captured at the start: no capture is added, and no weight has moved.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

import torch

from perf.rl.engine import facts
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import SMALL, WORK, say

STAGE, MODEL = "weights", "llama"
LENGTHS = (5, 17, 70) if SMALL else (5, 17, 100, 255, 700, 1500) * 4
NEW = 4 if SMALL else 64
VERSIONS = 3


class Graphs:
    """Captures and replays of CUDA graphs of this process, counted from its start on."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        graph = torch.cuda.CUDAGraph
        begin, replay = graph.capture_begin, graph.replay

        def counted_begin(*args, **kwargs):
            self.captures += 1
            return begin(*args, **kwargs)

        def counted_replay(*args, **kwargs):
            self.replays += 1
            return replay(*args, **kwargs)

        graph.capture_begin, graph.replay = counted_begin, counted_replay


def addresses(worker) -> list[int]:
    """Where a worker's parameters lie."""
    return [p.data_ptr() for p in worker.model_runner.model.parameters()]


def perturb(model: torch.nn.Module, seed: int) -> None:
    """Change each parameter by some hundredths of its own size."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.03 * torch.randn_like(parameter))


def message(call) -> str | None:
    """Text of what a call raises; None: nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace(str(WORK), "WORK")
    return None


class Run:
    """The engine, the trainer and the folder between them."""

    def __init__(self) -> None:
        self.graphs = Graphs()
        self.llm = large.start(
            MODEL, 64, worker_extension_cls=large.EXTENSION, enable_prefix_caching=True
        )
        self.trainer = large.load_trainer(MODEL)
        self.folder = WORK / "published"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.prompts = large.random_prompts(large.config_of(MODEL).vocab_size, LENGTHS, 3)
        self.captured = self.graphs.captures
        self.addresses = self.llm.collective_rpc(addresses)

    def publish(self, version: int):
        """Publish the trainer's weights; their manifest."""
        from cute_kernels.integrations.publish import publish_weights

        return publish_weights(self.folder, self.trainer, version=version)

    def load(self, version: int) -> None:
        """Load a version into the engine."""
        arguments = str(self.folder), version
        self.llm.collective_rpc("cute_kernels_load_published", args=arguments)
        self.llm.reset_prefix_cache()

    def differing(self) -> dict[str, int]:
        """Log-probs of a rollout that are not those of the trainer as it is now."""
        pairs = large.decoded(large.generate(self.llm, self.prompts, NEW))
        return large.count_differing(large.grouped(pairs), large.score_with(self.trainer))

    def refusal(self, manifest) -> str | None:
        """How the engine's contract differs from the trainer's with published weights."""
        import cute_kernels as ck
        from cute_kernels.integrations.contract_exchange import require_engine

        contract = ck.contract(model=self.trainer, weights=manifest)
        return message(
            lambda: require_engine(contract, self.llm.collective_rpc("cute_kernels_contract"))
        )

    def say(self, what: str, **numbers: object) -> None:
        """Record what was seen, and whether the graphs are the first ones."""
        say(
            STAGE,
            what,
            **numbers,
            captures_added=self.graphs.captures - self.captured,
            replays=self.graphs.replays,
            weights_moved=self.llm.collective_rpc(addresses) != self.addresses,
        )


def main() -> None:
    """Publish, load and score several versions; then write weights directly."""
    began = time.time()
    run = Run()
    start = round(time.time() - began, 1)
    say(STAGE, "engine", seconds=start, captures=run.captured, **facts(run.llm))
    for version in range(1, VERSIONS + 1):
        if version > 1:
            perturb(run.trainer, version)
        manifest = run.publish(version)
        stale = run.refusal(manifest)
        # With the weights of before, the control: the trainer's are others already.
        before = run.differing() if version > 1 else None
        began_load = time.perf_counter()
        run.load(version)
        took = round(time.perf_counter() - began_load, 2)
        run.say(
            "version",
            version=version,
            **run.differing(),
            old_weights=before,
            refused_before_load=stale,
            contract_error=run.refusal(manifest),
            load_s=took,
        )
    run.say("older_version_refused", message=message(lambda: run.load(VERSIONS - 1)))
    perturb(run.trainer, 99)
    state = {k: v for k, v in run.trainer.state_dict().items() if not k.endswith("inv_freq")}

    def write(worker) -> None:
        worker.model_runner.model.load_weights(state.items())

    run.llm.collective_rpc(write)
    run.llm.reset_prefix_cache()
    run.say("directly_written", **run.differing(), contract_error=run.refusal(manifest))
    say(STAGE, "done", seconds=round(time.time() - began, 1))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
