"""examples/grpo_vllm.py without vLLM: its parts, and its steps beside a stand-in of an engine.

The stand-in decodes token by token with a cache, one sequence at a time.  With vLLM itself:
tests/integrations/vllm/test_loop.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ContractError
from cute_kernels.integrations import published
from tests.integrations import decoder
from tests.integrations.vllm import loop, stand_in

grpo = loop.load()
SIZES = ["--hidden=128", "--layers=1", "--groups=2", "--samples=2", "--steps=2"]
SIZES += ["--prompt-length=5", "--new-tokens=4", "--micro-batch=3"]


# ---- its parts ----------------------------------------------------------------------------------


def test_rewards_and_advantages():
    assert grpo.reward([2, 4, 7, 0], 4) == 0.75
    assert grpo.reward([2, 4], 4) == 0.5  # ending early does not pay
    gains = grpo.advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), samples=2)
    assert gains.shape == (4, 1) and gains[0] > 0 > gains[1]
    assert gains[0] == -gains[1] and not gains[2:].any()


def test_rollouts_of_any_lengths_are_packed():
    out = grpo.pack([[5, 6], [7, 8, 9]], [[1, 2, 3], [4]], [[-1.0, -2.0, -3.0], [-4.0]])
    assert out.ids.tolist() == [[5, 6, 1, 2, 3], [7, 8, 9, 4, 0]]
    assert out.attention.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert out.drawn.tolist() == [[False, True, True, True], [False, False, True, False]]
    assert out.old[out.drawn].tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_bytes_are_compared():
    a = torch.tensor([0.0, 1.0, float("nan")])
    assert grpo.differing(a, a.clone()) == 0
    assert grpo.differing(a, torch.tensor([-0.0, 1.0, float("nan")])) == 1
    assert grpo.differing(a, torch.nextafter(a, torch.tensor(9.0))) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps=0"], "--steps: expected a number above 0, got 0"),
        (["--learning-rate=-1"], "--learning-rate: expected a number above 0"),
        (["--samples=1"], "--samples: expected at least 2"),
        (["--hidden=192"], "--hidden: expected a multiple of 128, got 192"),
        (["--model=nowhere"], "--model: expected a folder with a config.json, got nowhere"),
        (["--layers=x"], "--layers"),
    ],
)
def test_a_wrong_argument_is_named(options, words, capsys):
    with pytest.raises(SystemExit) as ended:
        grpo.arguments(options)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_what_is_missing_is_one_line(monkeypatch, capsys):
    find = grpo.importlib.util.find_spec
    monkeypatch.setattr(
        grpo.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name)
    )
    assert grpo.main([]) == 2
    assert capsys.readouterr().err == ("grpo_vllm: vllm is not installed: docs/vllm.md says how\n")
    monkeypatch.setattr(grpo.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(grpo.importlib.metadata, "entry_points", lambda group: ())
    assert grpo.main([]) == 2
    assert "vLLM cannot find its plug-in: pip install ." in capsys.readouterr().err


# ---- its steps ----------------------------------------------------------------------------------


class Worker(stand_in.Worker):
    """A worker whose model is a patched one."""

    def cute_kernels_contract(self):
        model = self.model_runner.model
        weights = published.manifest_in_use(model)
        return ck.contract(model=model, weights=weights).to_dict()


class Engine:
    """Stand-in of ``vllm.LLM``; ``rounded``: its log-probs are of rounded logits."""

    rounded, worker_of = False, Worker

    def __init__(self, model: str, **settings: object) -> None:
        self.settings = settings
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace())
        auto = transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(model, dtype=torch.bfloat16).eval()
        if settings["additional_config"]["cute_kernels"]:
            ck.patch(self.model, strict=True)
        self.worker = self.worker_of(self.model)

    def collective_rpc(self, method: str, args: tuple = ()) -> list:
        return [self.worker.rpc(method, *args)]

    def reset_prefix_cache(self) -> None:
        """Do nothing: this engine has no cache."""

    def generate(self, requests, parameters, use_tqdm):
        return [self._complete(*pair) for pair in zip(requests, parameters, strict=True)]

    def _complete(self, request, parameters):
        options = {"ends": self.model.config.eos_token_id, "most": parameters.max_tokens}
        options |= {"generator": torch.Generator().manual_seed(parameters.seed)}
        options["rounded"] = self.rounded
        tokens, scores = decoder.complete(self.model, request.prompt_token_ids, **options)
        steps = [{t: SimpleNamespace(logprob=x)} for t, x in zip(tokens, scores, strict=True)]
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=steps)])


@pytest.fixture
def loop_of(monkeypatch, tmp_path):
    """Runs the example with a class in the place of ``vllm.LLM``; its exit code."""

    def run(engine: type, *more: str) -> int:
        vllm = ModuleType("vllm")
        vllm.LLM, vllm.SamplingParams, vllm.TokensPrompt = engine, SimpleNamespace, SimpleNamespace
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setattr(grpo, "missing", lambda: None)
        for name in grpo.ENVIRONMENT:
            monkeypatch.setenv(name, "1")
        return grpo.main([*SIZES, *more, f"--weights={tmp_path / 'weights'}"])

    return run


def test_a_loop_of_two_steps(loop_of, capsys, tmp_path):
    assert loop_of(Engine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "cpu: rollout and trainer agree in 2 of 2 steps"
    for step, line in enumerate(lines[:-1], 1):
        assert line.startswith(f"step {step}: reward ") and "log-probs that differ 0 of" in line
        assert "contract equal" in line
        assert all(f"{part} " in line for part in ("generate", "log-probs", "update"))
    versions = sorted(path.name for path in (tmp_path / "weights").glob("v*"))
    assert versions == ["v00000001", "v00000002"]
    files = [(tmp_path / "weights" / v / "model.safetensors").read_bytes() for v in versions]
    assert files[0] != files[1]  # something was learnt


def test_an_engine_that_keeps_old_weights_stops_the_loop(loop_of):
    """The control of the contract: without it, only log-probs would tell."""
    stale = type("Stale", (Worker,), {"cute_kernels_load_published": lambda *args: None})
    engine = type("StaleEngine", (Engine,), {"worker_of": stale})
    with pytest.raises(ContractError, match=r"weights: version 1, .* here, not stated there"):
        loop_of(engine)


def test_an_engine_without_the_plug_in_stops_the_loop(loop_of):
    class Plain(Engine):
        def __init__(self, model, **settings):
            super().__init__(model, **settings | {"additional_config": {"cute_kernels": False}})

    with pytest.raises(ContractError, match=r"formula of rms_norm: ck\.rms_norm.* here, LlamaRMS"):
        loop_of(Plain)


def test_rounded_logits_are_counted(loop_of, capsys):
    """The control of the count: contracts agree, bytes do not."""
    assert loop_of(type("Rounded", (Engine,), {"rounded": True})) == 1
    out = capsys.readouterr().out
    assert "agree in 0 of 2 steps" in out and "differ 0 of" not in out


def test_stock_is_a_control_that_goes_on(loop_of, capsys):
    """A model of this width has the same bytes unpatched; its contract has not."""
    assert loop_of(type("Rounded", (Engine,), {"rounded": True}), "--stock", "--steps=1") == 1
    assert "contract 11 lines differ; " in capsys.readouterr().out
