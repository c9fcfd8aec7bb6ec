"""Stages of `card` that run in its process: ``python -m tests.integrations.vllm.card STAGE``.

Families: the cases of `test_engine` in eager mode, which `engine` draws.  Many: an engine draws and
scores in rounds, a file of each in $WORK: prompts of nearly 16k tokens ("long"), batches of as many
sequences as graphs hold at temperature 1 ("decode"), prompts of 4k tokens prefilled in chunks
("prompt").  Counted are the log-probs that vLLM's public interface returned.  Weights: versions are
published, loaded between calls of `generate` and scored, at last written without the disk, while
the captured graphs stay.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from perf.rl.engine import facts
from tests.integrations.vllm import gpu_hybrids, trainer
from tests.integrations.vllm import gpu_large as large
from tests.integrations.vllm.gpu_large import SMALL, WORK, say

# ---- families ------------------------------------------------------------------------------------

FAMILIES, FILE = WORK / "families", "drawn.jsonl"


def score_families(folder: Path = FAMILIES) -> None:
    """Score what `engine` drew of each case, and count the log-probs that differ in each run."""
    lines = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    for name in dict.fromkeys(line["case"] for line in lines):
        mine = [line for line in lines if line["case"] == name]
        for line, bits in zip(mine, trainer.bits_of(name, folder, mine, "chain"), strict=True):
            line["differ"] = sum(a != b for a, b in zip(line["bits"], bits, strict=True))
        for run in dict.fromkeys(line["run"] for line in mine):
            of_run = [line for line in mine if line["run"] == run]
            numbers = {key: sum(line[key] for line in of_run) for key in ("differ", "cached")}
            numbers["preempted"] = max(line["preempted"] for line in of_run)
            numbers["count"] = sum(len(line["bits"]) for line in of_run)
            say("families_trainer", "engine_vs_trainer", of=name, run=run, **numbers)


# ---- many ----------------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """Sizes of the rounds of a model.

    sequences, new: of a round of decoding.  lengths: of its prompts, each as often.
    long: prompts of the first round, and tokens that each draws.
    """

    sequences: int
    new: int
    lengths: tuple[int, ...]
    long: tuple[int, int]
    prompts: int
    prompt: int


ROUNDS = {
    "llama": Rounds(512, 512, (16, 128, 512, 1024), (16, 128), 64, 4096),
    "qwen3": Rounds(256, 512, (16, 128, 512, 1024), (8, 128), 64, 4096),
}
if SMALL:
    ROUNDS = dict.fromkeys(ROUNDS, Rounds(8, 6, (5, 17, 40, 70), (2, 4), 4, 100))
#: Part of the seconds after which no round of decoding starts.
DECODE_SHARE = 0.5
LONG_PROMPT = 200 if SMALL else 16000


def save(model: str, kind: str, number: int, scores: list[large.Scores]) -> int:
    """Write a round's scores; how many log-probs they hold."""
    torch.save([tuple(one) for one in scores], WORK / f"many_{model}_{number:03}_{kind}.pt")
    return sum(one.logps.numel() for one in scores)


def draw_many(model: str, seconds: float) -> None:
    """Draw and score until the seconds are spent."""
    began, sizes = time.time(), ROUNDS[model]
    for path in WORK.glob(f"many_{model}_*.pt"):
        path.unlink()
    llm = large.start(model, sizes.sequences, memory=0.8)
    vocab = large.config_of(model).vocab_size
    say("many", "engine", of=model, seconds=round(time.time() - began, 1), **facts(llm))
    large.generate(llm, large.random_prompts(vocab, [20] * 4, 0), 4)
    counts, number, start = Counter(), 0, time.time()
    while number == 0 or time.time() - start < seconds:
        round_start = time.time()
        if number == 0:
            kind, (rows, new) = "long", sizes.long
            prompts = large.random_prompts(vocab, range(LONG_PROMPT - rows, LONG_PROMPT), number)
            outputs = large.generate(llm, prompts, new, temperature=1.0, prompt_logprobs=0)
            pairs = large.decoded(outputs)
            counts["decode"] += save(model, "decode", 0, list(large.grouped(pairs)))
            pairs = large.prompted(outputs)
        elif time.time() - start < DECODE_SHARE * seconds:
            kind, repeats = "decode", sizes.sequences // len(sizes.lengths)
            prompts = large.random_prompts(vocab, sizes.lengths * repeats, number)
            outputs = large.generate(llm, prompts, sizes.new, temperature=1.0)
            pairs = large.decoded(outputs)
        else:
            kind = "prompt"
            prompts = large.random_prompts(vocab, [sizes.prompt] * sizes.prompts, number)
            pairs = large.prompted(large.generate(llm, prompts, 1, prompt_logprobs=0))
        count = save(model, kind, number, list(large.grouped(pairs)))
        counts[kind] += count
        took = round(time.time() - round_start, 2)
        say("many", "round", of=model, kind=kind, count=count, seconds=took, so_far=dict(counts))
        number += 1
    say("many", "done", of=model, counts=dict(counts), seconds=round(time.time() - began, 1))


def score_many(model: str, seconds: float) -> None:
    """Score the rounds until the seconds are spent; the control last."""
    began, end = time.time(), None
    paths = sorted(WORK.glob(f"many_{model}_*.pt"))
    trained = large.load_trainer(model)
    score, count, differ = large.score_with(trained), Counter(), Counter()
    for done, path in enumerate(paths, 1):
        kind = path.stem.rsplit("_", 1)[1]
        counts = large.count_differing((large.Scores(*one) for one in torch.load(path)), score)
        count[kind] += counts["count"]
        differ[kind] += counts["differ"]
        numbers = {"rounds": f"{done} of {len(paths)}", "kinds": dict(count)}
        say("many_trainer", "so_far", of=model, **numbers, differ=dict(differ))
        end = end or time.time() + seconds  # the first round compiles kernels
        if time.time() > end:
            break
    numbers |= {"count": count.total(), "differ": differ.total()}
    took = round(time.time() - began, 1)
    say("many_trainer", "engine_vs_trainer", of=model, **numbers, seconds=took)
    del trained, score
    control(model, paths[-1])


def control(model: str, path: Path) -> None:
    """Count the log-probs of a pass that an unpatched trainer has otherwise."""
    import transformers

    stock = transformers.AutoModelForCausalLM.from_pretrained(
        WORK / model, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    stock.to(large.DEVICE).eval()

    def score(ids: torch.Tensor) -> torch.Tensor:
        logits = stock(ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    scores = large.Scores(*torch.load(path)[0])
    first = large.Scores(scores.ids[:1], scores.logps[:1])
    say("many_trainer", "control", of=model, **large.count_differing([first], score))


# ---- weights -------------------------------------------------------------------------------------

STAGE, MODEL = "weights", "llama"
WEIGHTS_LENGTHS = (5, 17, 70) if SMALL else (5, 17, 100, 255, 700, 1500) * 4
WEIGHTS_NEW = 4 if SMALL else 64
VERSIONS = 3


class Graphs:
    """Captures and replays of CUDA graphs of this process, counted from its start on."""

    def __init__(self) -> None:
        self.counts = Counter()
        for name in ("capture_begin", "replay"):
            setattr(torch.cuda.CUDAGraph, name, self._counted(name))

    def _counted(self, name: str):
        true = getattr(torch.cuda.CUDAGraph, name)

        def run(*args, **kwargs):
            self.counts[name] += 1
            return true(*args, **kwargs)

        return run


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


def change_weights() -> None:
    """Publish, load and score several versions; then write weights directly."""
    import cute_kernels as ck
    from cute_kernels.integrations.contract_exchange import require_engine
    from cute_kernels.integrations.publish import publish_weights

    began, graphs, folder = time.time(), Graphs(), WORK / "published"
    options = {"worker_extension_cls": large.EXTENSION, "enable_prefix_caching": True}
    llm, trained = large.start(MODEL, 64, **options), large.load_trainer(MODEL)
    shutil.rmtree(folder, ignore_errors=True)
    prompts = large.random_prompts(large.config_of(MODEL).vocab_size, WEIGHTS_LENGTHS, 3)
    captured, first = graphs.counts["capture_begin"], llm.collective_rpc(addresses)
    seconds = round(time.time() - began, 1)
    say(STAGE, "engine", seconds=seconds, captures=captured, **facts(llm))

    def load(version: int) -> None:
        llm.collective_rpc("cute_kernels_load_published", args=(str(folder), version))
        llm.reset_prefix_cache()

    def differing() -> dict[str, int]:
        """Log-probs of a rollout that are not those of the trainer as it is now."""
        pairs = large.decoded(large.generate(llm, prompts, WEIGHTS_NEW))
        return large.count_differing(large.grouped(pairs), large.score_with(trained))

    def refusal(manifest) -> str | None:
        """How the engine's contract differs from the trainer's with published weights."""
        contract = ck.contract(model=trained, weights=manifest)
        theirs = llm.collective_rpc("cute_kernels_contract")
        return message(lambda: require_engine(contract, theirs))

    def record(what: str, **numbers: object) -> None:
        """Record what was seen, and whether the graphs and weights are where they were."""
        added = graphs.counts["capture_begin"] - captured
        numbers |= {"captures_added": added, "replays": graphs.counts["replay"]}
        say(STAGE, what, **numbers, weights_moved=llm.collective_rpc(addresses) != first)

    for version in range(1, VERSIONS + 1):
        if version > 1:
            perturb(trained, version)
        manifest = publish_weights(folder, trained, version=version)
        numbers = {"version": version, "refused_before_load": refusal(manifest)}
        # With the weights of before, the control: the trainer's are others already.
        numbers["old_weights"] = differing() if version > 1 else None
        began_load = time.perf_counter()
        load(version)
        numbers["load_s"] = round(time.perf_counter() - began_load, 2)
        record("version", **numbers, **differing(), contract_error=refusal(manifest))
    record("older_version_refused", message=message(lambda: load(VERSIONS - 1)))
    perturb(trained, 99)
    state = {k: v for k, v in trained.state_dict().items() if not k.endswith("inv_freq")}
    llm.collective_rpc(lambda worker: worker.model_runner.model.load_weights(state.items()))
    llm.reset_prefix_cache()
    record("directly_written", **differing(), contract_error=refusal(manifest))
    say(STAGE, "done", seconds=round(time.time() - began, 1))


def functions() -> dict[str, Callable[[], None]]:
    """Stage -> what it runs; $MANY_SECONDS: of the rounds of a stage "many_..."."""
    seconds, partial = float(os.environ.get("MANY_SECONDS", "120")), functools.partial
    out = {"weights": change_weights, "families_trainer": score_families}
    for model in ("llama", "qwen3"):
        out[f"large_{model}"] = partial(large.save_model, model)
        out[f"many_{model}"] = partial(draw_many, model, seconds)
        out[f"many_{model}_trainer"] = partial(score_many, model, seconds)
    return out | {gpu_hybrids.STAGE + n: partial(gpu_hybrids.run, n) for n in gpu_hybrids.HYBRIDS}
