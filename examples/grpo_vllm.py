"""A whole GRPO loop with vLLM as the rollout: every importance ratio is exactly 1.

    python examples/grpo_vllm.py                     a random Llama; a minute on a CPU
    python examples/grpo_vllm.py --model PATH        a checkpoint that vLLM and the plug-in take
    python examples/grpo_vllm.py --stock             the control: vLLM without the plug-in

    vLLM draws groups -> rewards -> log-probs (ck.linear_logp) -> update -> publish_weights
       ^                                                                         |
       +-- contracts compared <-- every worker loads the version that was published

A completion's reward is its number of tokens with an even id, over the most that there can be:
anybody can verify it.  Exit code 1: a log-prob of the rollout is not the trainer's, or a ratio is
not 1.  docs/vllm.md says what to install.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import cute_kernels as ck
from cute_kernels.errors import ContractError
from cute_kernels.integrations.contract_exchange import require_engine
from cute_kernels.integrations.engine_watch import watch_engine
from cute_kernels.integrations.publish import publish_weights
from cute_kernels.integrations.transformers import policy_loss, token_logps

#: Of a random model; so many of its tokens end a completion, so that lengths differ.
VOCABULARY, ENDS = 1024, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXTENSION = "cute_kernels.integrations.contract_exchange.WorkerExtension"
#: Whole numbers on the command line; those of the model count for a random one.
DEFAULTS = {
    "hidden": 256,
    "layers": 2,
    "steps": 6,
    "groups": 4,
    "samples": 8,
    "prompt-length": 24,
    "new-tokens": 16,
    "micro-batch": 16,
}
#: Defaults of vLLM's process: the engine lives in this one, and nothing leaves the machine.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is imported without a look whether it is there
    "HF_HUB_OFFLINE": "1",
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; else a random Llama")
    parser.add_argument("--stock", action="store_true", help="vLLM without the plug-in")
    parser.add_argument("--weights", type=Path, help="folder to publish to; else a temporary one")
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(argv)
    for name, value in vars(options).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number above 0, got {value}")
    if options.samples < 2:
        parser.error("--samples: expected at least 2: a group's mean is the baseline")
    if options.hidden % 128:
        parser.error(f"--hidden: expected a multiple of 128, got {options.hidden}")
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model: expected a folder with a config.json, got {options.model}")
    return options


def missing() -> str | None:
    """One line that names what is not installed; None: nothing is missing."""
    for package in ("vllm", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: docs/vllm.md says how"
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "cute_kernels" not in {plugin.name for plugin in plugins}:
        return "cute-kernels is not installed here, so vLLM cannot find its plug-in: pip install ."
    return None


def save_random_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a random Llama in bf16, whose distributions are neither flat nor certain."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        initializer_range=hidden**-0.5,
        bos_token_id=None,
        eos_token_id=list(range(ENDS)),
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


# ---- the rollout ---------------------------------------------------------------------------------


def start_engine(model: Path, options: argparse.Namespace, **more: object):
    """vLLM with the plug-in, and with the RPC that loads weights and states its contract."""
    from vllm import LLM

    longest = options.prompt_length + options.new_tokens
    rows = options.groups * options.samples
    settings = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": -(-longest // 32) * 32,
        "max_num_seqs": rows,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "worker_extension_cls": EXTENSION,
        "additional_config": {"cute_kernels": not options.stock},
        "seed": 0,
    }
    if DEVICE == "cuda":
        settings |= {"gpu_memory_utilization": 0.4}
    else:  # there vLLM cannot cut the prefill of a request with a seed
        settings |= {"enforce_eager": True, "max_num_batched_tokens": max(2048, rows * longest)}
    engine = LLM(model=str(model), **settings | more)
    watch_engine(engine)  # an engine that is killed raises, instead of being waited for
    return engine


def hand_over(engine, folder: Path, version: int) -> None:
    """Load a published version into every worker; what was cached is of the old weights."""
    engine.collective_rpc("cute_kernels_load_published", args=(str(folder), version))
    engine.reset_prefix_cache()


def contract_error(engine, contract: ck.Contract) -> str | None:
    """Return how the trainer's contract differs from the workers'; None: it does not."""
    try:
        require_engine(contract, engine.collective_rpc("cute_kernels_contract"))
    except ContractError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Rollout:
    """Completions of one step, padded on the right.

    Attributes:
        ids, attention: Prompts and completions [B, S].
        drawn: [B, S - 1]; whether the token at t + 1 was drawn.
        old: fp32 [B, S - 1], the engine's log-probs of the drawn tokens, 0 elsewhere.
        completions: Drawn tokens of each row.
    """

    ids: torch.Tensor
    attention: torch.Tensor
    drawn: torch.Tensor
    old: torch.Tensor
    completions: list[list[int]]


def generate(engine, prompts: list[list[int]], options: argparse.Namespace, seed: int) -> Rollout:
    """Draw a group of completions for each prompt."""
    from vllm import SamplingParams, TokensPrompt

    requests = [prompt for prompt in prompts for _ in range(options.samples)]
    parameters = [
        SamplingParams(
            temperature=options.temperature,
            max_tokens=options.new_tokens,
            logprobs=0,
            seed=seed + row,
            detokenize=False,
        )
        for row in range(len(requests))
    ]
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in requests]
    outputs = [output.outputs[0] for output in engine.generate(inputs, parameters, use_tqdm=False)]
    completions = [list(output.token_ids) for output in outputs]
    logps = [
        [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
        for output in outputs
    ]
    return pack(requests, completions, logps)


def pack(
    prompts: list[list[int]], completions: list[list[int]], logps: list[list[float]]
) -> Rollout:
    """Tensors of completions of any length."""
    shape = len(prompts), max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids, attention = torch.zeros(2, *shape, dtype=torch.int64)
    old = torch.zeros(shape)
    drawn = torch.zeros(shape, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first, end = len(prompt), len(prompt) + len(completion)
        ids[row, :end] = torch.tensor(prompt + completion)
        attention[row, :end] = 1
        drawn[row, first:end] = True
        old[row, first:end] = torch.tensor(logps[row])
    ids, attention, drawn, old = (t.to(DEVICE) for t in (ids, attention, drawn, old))
    return Rollout(ids, attention, drawn[:, 1:], old[:, 1:], completions)


# ---- rewards -------------------------------------------------------------------------------------


def reward(completion: list[int], most: int) -> float:
    """Tokens with an even id, over the most tokens that a completion can have."""
    return sum(token % 2 == 0 for token in completion) / most


def advantages(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Rewards [B] less the mean of their group, over its deviation: [B, 1]."""
    groups = rewards.view(-1, samples)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)


# ---- the trainer ---------------------------------------------------------------------------------


class Trainer:
    """A patched model, with fp32 copies of its parameters that AdamW updates."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM

        self.options = options
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE)
        ck.patch(self.model.eval(), strict=True)
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=options.learning_rate, weight_decay=0.0)

    def inputs(self, rollout: Rollout, rows: slice) -> dict[str, object]:
        """What scores some of the padded rows."""
        mask, temperature = rollout.attention[rows], self.options.temperature
        ids = rollout.ids[rows]
        return {"input_ids": ids, "attention_mask": mask, "temperature": temperature}

    @torch.no_grad()
    def score(self, rollout: Rollout) -> torch.Tensor:
        """Log-probs [B, S - 1] without gradients."""
        parts = self.micro_batches(rollout)
        return torch.cat([token_logps(self.model, **self.inputs(rollout, rows)) for rows in parts])

    def micro_batches(self, rollout: Rollout) -> list[slice]:
        """Slices of the rows."""
        size = self.options.micro_batch
        return [slice(first, first + size) for first in range(0, len(rollout.ids), size)]

    def update(self, rollout: Rollout, gains: torch.Tensor) -> torch.Tensor:
        """One step of AdamW; the ratios of the drawn tokens."""
        count, ratios = int(rollout.drawn.sum()), []
        for rows in self.micro_batches(rollout):
            drawn, old = rollout.drawn[rows], rollout.old[rows]
            of_loss = {"advantages": gains[rows], "mask": drawn, "old_logp": old, "divisor": count}
            inputs = self.inputs(rollout, rows)
            out = policy_loss(self.model, **inputs, loss="grpo", reduction="sum", **of_loss)
            out.loss.backward()
            ratios.append((out.logp - old).exp()[drawn])
        ck.clip_grad_norm_(self.parameters, 1.0)
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                parameter.copy_(master)
        return torch.cat(ratios)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of two fp32 tensors whose bytes differ."""
    return int((a.contiguous().view(torch.int32) != b.contiguous().view(torch.int32)).sum())


class Clock:
    """Seconds of the parts of a step, each awaited."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last call was that of a part."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        before, self.last = self.last, time.perf_counter()
        self.times[name] = self.last - before


# ---- the loop ------------------------------------------------------------------------------------


def prompts_of(step: int, vocabulary: int, options: argparse.Namespace) -> list[list[int]]:
    """Random prompts of a step, one for each group."""
    draw = torch.Generator().manual_seed(step)
    shape = options.groups, options.prompt_length
    return torch.randint(ENDS, vocabulary, shape, generator=draw).tolist()


def learn(trainer: Trainer, rollout: Rollout, clock: Clock) -> tuple[bool, str]:
    """Rewards, log-probs and an update; whether all agreed, and a line about it."""
    options = trainer.options
    rewards = [reward(c, options.new_tokens) for c in rollout.completions]
    gains = advantages(torch.tensor(rewards, device=DEVICE), options.samples)
    logps = trainer.score(rollout)
    clock.lap("log-probs")
    ratio = trainer.update(rollout, gains)
    clock.lap("update")
    other = differing(logps[rollout.drawn], rollout.old[rollout.drawn])
    ones, count = int((ratio == 1).sum()), len(ratio)
    text = f"reward {sum(rewards) / len(rewards):.3f}, log-probs that differ {other} of {count}"
    return other == 0 and ones == count, f"{text}, ratio exactly 1 for {ones} of {count}"


def run_step(trainer: Trainer, engine, folder: Path, step: int) -> bool:
    """One step of GRPO; whether each log-prob was the trainer's and each ratio was 1.

    Raises:
        ContractError: the engine has another contract, and ``--stock`` does not ask for that.
    """
    options, clock = trainer.options, Clock()
    manifest = publish_weights(folder, trainer.model, {"step": step}, version=step)
    hand_over(engine, folder, step)
    clock.lap("publish and load")
    error = contract_error(engine, ck.contract(model=trainer.model, weights=manifest))
    if error is not None and not options.stock:
        raise ContractError(error)
    clock.lap("contract")
    prompts = prompts_of(step, trainer.model.config.vocab_size, options)
    rollout = generate(engine, prompts, options, seed=1000 * step)
    clock.lap("generate")
    good, text = learn(trainer, rollout, clock)
    times = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in clock.times.items())
    contract = "equal" if error is None else f"{len(error.splitlines()) - 1} lines differ"
    print(f"step {step}: {text}, contract {contract}; {times}", flush=True)
    return good


def main(argv: list[str] | None = None) -> int:
    """Run the steps; 0: every ratio was 1, 1: one was not, 2: something is missing."""
    options = arguments(argv)
    if (line := missing()) is not None:
        print(f"grpo_vllm: {line}", file=sys.stderr)
        return 2
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as scratch:
        path = options.model or Path(scratch, "model")
        if options.model is None:
            save_random_model(path, options.hidden, options.layers)
        engine = start_engine(path, options)
        trainer = Trainer(path, options)
        folder = options.weights or Path(scratch, "weights")
        good = [run_step(trainer, engine, folder, step) for step in range(1, options.steps + 1)]
    print(f"{DEVICE}: rollout and trainer agree in {sum(good)} of {len(good)} steps")
    return 0 if all(good) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads are not waited for
