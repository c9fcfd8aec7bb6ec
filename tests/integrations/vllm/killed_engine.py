"""Steps of examples/grpo_vllm.py, whose engine is killed in the middle of all but the first.

    python -m tests.integrations.vllm.killed_engine FOLDER OUT [DEATH...]

A death for each step from the second on: "generate": after three tokens of the step's rollout;
"load": half-way through the load of the step's weights; "worker": there too, but the worker alone,
not the engine's core.  The engine lives in processes of vLLM's own and is started anew; the trainer
goes on.  OUT gets a JSON object: of each step what was drawn and learnt, and of each death what was
said of it and of the new engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from cute_kernels.errors import ContractError
from cute_kernels.integrations.contract_exchange import WorkerExtension
from tests.hang import HANG_SECONDS
from tests.integrations.vllm import loop, processes

STEPS = 4
SIZES = ("--groups=2", "--samples=3", "--new-tokens=8", "--prompt-length=20", "--micro-batch=4")


class MortalWorker(WorkerExtension):
    """A worker in which a load ends half-way: it or the engine's core is killed."""

    def load_and_die(self, path: str, version: int, victim: int | None) -> None:
        """Load a version, but for its last tensors; victim: a process, None: this one."""
        reload = self.reload_weights

        def until_half(weights_iterator):
            pairs = list(weights_iterator)

            def half():
                yield from pairs[: len(pairs) // 2]
                os.kill(victim or os.getpid(), signal.SIGKILL)
                time.sleep(HANG_SECONDS)  # an orphan, which ends with its process group

            reload(weights_iterator=half())

        self.reload_weights = until_half
        self.cute_kernels_load_published(path, version)


def message(call, *kinds: type[Exception]) -> str:
    """Return what a call that must fail raises, in one of these classes."""
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def kill_while_drawing(engine) -> None:
    """Kill the process of the engine's core after three of its steps."""
    step, count = engine.llm_engine.step, 0

    def counted():
        nonlocal count
        outputs = step()
        count += 1
        if count == 3:
            os.kill(core_pid(engine), signal.SIGKILL)
        return outputs

    engine.llm_engine.step = counted


def core_pid(engine) -> int:
    """Process of the engine's core: the one that computes."""
    (process,) = engine.llm_engine.engine_core.resources.engine_manager.processes
    return process.pid


def digest(*tensors) -> str:
    """SHA-256 of the bytes of tensors."""
    content = b"".join(t.detach().cpu().contiguous().numpy().tobytes() for t in tensors)
    return hashlib.sha256(content).hexdigest()


def main(folder: Path, out: Path, deaths: list[str]) -> None:
    """Run the steps; start the engine anew where it was killed."""
    import cute_kernels as ck
    from cute_kernels.integrations.publish import publish_weights

    grpo = loop.load()
    options = grpo.arguments(list(SIZES))
    model, weights = folder / "model", folder / "weights"
    grpo.save_random_model(model, options.hidden, options.layers)
    extension = f"{__package__}.killed_engine.MortalWorker"

    def start():
        return grpo.start_engine(model, options, worker_extension_cls=extension)

    def draw(engine, step: int):
        """Do what the example does between two updates."""
        grpo.hand_over(engine, weights, step)
        contract = ck.contract(model=trainer.model, weights=manifest)
        error = grpo.contract_error(engine, contract)
        assert error is None, error
        prompts = grpo.prompts_of(step, trainer.model.config.vocab_size, options)
        return grpo.generate(engine, prompts, options, seed=1000 * step)

    engine, trainer = start(), grpo.Trainer(model, options)
    report: dict[str, object] = {"steps": [], "deaths": {}, "refused": {}}
    deaths = dict(enumerate(deaths, 2))
    for step in range(1, STEPS + 1):
        manifest = publish_weights(weights, trainer.model, version=step)
        if when := deaths.get(step):
            report["deaths"][when] = die(engine, weights, step, when, draw)
            del engine
            engine = start()
            report["refused"][when] = refusals(
                engine, weights, step, ck.contract(model=trainer.model, weights=manifest)
            )
        rollout = draw(engine, step)
        good, text = grpo.learn(trainer, rollout, grpo.Clock())
        report["steps"].append(
            {
                "good": good,
                "text": text,
                "drawn": digest(rollout.ids, rollout.drawn, rollout.old),
                "learnt": digest(*trainer.masters),
                "published": manifest.files["model.safetensors"]["sha256"],
            }
        )
    out.write_text(json.dumps(report, indent=1))
    if deaths:
        os.kill(core_pid(engine), signal.SIGKILL)


def die(engine, weights: Path, step: int, when: str, draw) -> str:
    """Let the engine be killed; what its caller is told."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if when in ("load", "worker"):
        kinds = EngineDeadError if when == "load" else Exception
        arguments = str(weights), step, core_pid(engine) if when == "load" else None
        return message(lambda: engine.collective_rpc("load_and_die", args=arguments), kinds)
    kill_while_drawing(engine)
    return message(lambda: draw(engine, step), EngineDeadError)


def refusals(engine, weights: Path, step: int, contract) -> dict[str, str]:
    """Return what is said of an engine with the weights of the model's folder, or older ones."""
    from cute_kernels.integrations.contract_exchange import require_engine

    def rpc(method: str, *args: object):
        return engine.collective_rpc(method, args=args)

    return {
        "unloaded": message(lambda: rpc("cute_kernels_require_version", step), Exception),
        "contract": message(
            lambda: require_engine(contract, rpc("cute_kernels_contract")), ContractError
        ),
        "older": message(
            lambda: rpc("cute_kernels_load_published", str(weights), step - 1), Exception
        ),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    processes.end()
