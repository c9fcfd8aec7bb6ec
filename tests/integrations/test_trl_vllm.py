"""TRL's vLLM modes at the trainer: contracts before a step, and ratios of exactly 1.

The engine is a stand-in with the methods of vLLM's that TRL calls: it decodes token by token with a
cache, on a copy of the model that TRL's weight updates reach.
"""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ContractError
from cute_kernels.integrations import contract_exchange, trl_vllm
from tests.contract import same_bytes

trl = pytest.importorskip("trl", reason="trl is not installed")
from tests.integrations import decoder, trl_step  # noqa: E402


class Trainer(trl_vllm.EngineLogps, trl_step.Trainer):
    """Keeps each micro-batch, and the log-probabilities it was learnt with."""


class Fused(trl_step.FusedTrainer, Trainer):
    """With the loss of `FusedLoss`."""


class Engine:
    """Stand-in of TRL's ``VLLMGeneration``; ``rounded``: whether log p is of rounded logits."""

    rounded = False
    part = staticmethod(lambda contract: contract)
    cut = staticmethod(lambda scores: scores)

    def __init__(self, model, mode, temperature, server_base_url=None, **options):
        self.mode, self.temperature, self.source = mode, temperature, model
        self.model = copy.deepcopy(model).eval()
        vars(self.model).pop("forward", None)  # TRL's, with a head of its own
        self.asked = 0
        if mode == "colocate":
            self.llm = self
        else:
            self.vllm_client, self.base_url = self, "http://engine"

    def collective_rpc(self, method):
        assert method is contract_exchange.worker_contract
        return self._answers()

    def _post(self, url, json):
        assert url == "http://engine/collective_rpc"
        assert json == {"method": "cute_kernels_contract"}
        assert hasattr(contract_exchange.WorkerExtension, json["method"])
        return {"results": self._answers()}

    def _answers(self):
        self.asked += 1
        dtype = torch.bfloat16 if self.rounded else torch.float32
        mine = ck.contract(model=self.model, logits_dtype=dtype)
        return json.loads(json.dumps([type(self).part(mine).to_dict()]))

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self):
        self.model.load_state_dict(self.source.state_dict())

    def generate(self, prompts, **options):
        options = {"ends": trl_step.ENDS, "most": trl_step.LONGEST, "rounded": self.rounded}
        options["temperature"] = self.temperature
        drawn = [decoder.complete(self.model, prompt, **options) for prompt in prompts]
        scores = [type(self).cut([[score] for score in scores]) for _, scores in drawn]
        return prompts, [tokens for tokens, _ in drawn], scores, None


def trainer(path, tokenizer, folder, monkeypatch, engine=Engine, args=None, cls=Trainer, **others):
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", engine)
    model = trl_step.load(path)
    logits = torch.bfloat16 if engine.rounded else torch.float32
    given = {"model": model, "contract": ck.contract(model=model, logits_dtype=logits)} | others
    settings = {"use_vllm": True, "beta": 0.0} | (args or {})
    return trl_step.trainer(path, tokenizer, folder, cls=cls, args=settings, **given)


class Rounded(Engine):
    rounded = True


@pytest.mark.parametrize(
    ("cls", "mode", "engine"),
    [
        (Trainer, "colocate", Engine),
        (Trainer, "server", Rounded),
        (Fused, "server", Engine),
    ],
)
def test_the_ratio_is_one(path, tokenizer, tmp_path, monkeypatch, cls, mode, engine):
    args = {"vllm_mode": mode, "beta": 0.1}
    one = trainer(path, tokenizer, tmp_path, monkeypatch, engine, args, cls)
    assert one.vllm_generation.asked == 1
    one.train()
    assert one.state.global_step == 1 and one.vllm_generation.asked == 2
    trl_step.check_on_policy(one)
    assert all(bool((batch["importance_sampling_ratio"] == 1).all()) for batch in one.batches)


def test_rounded_log_probs_are_not_those_of_linear_logp(path, tokenizer, tmp_path, monkeypatch):
    """The control: contracts that agree on float32 while the engine rounds its logits."""

    class Liar(Rounded):
        part = staticmethod(lambda c: type(c)(**{**vars(c), "logits_dtype": "float32"}))

    model = trl_step.load(path)
    contract = ck.contract(model=model, logits_dtype=torch.float32)
    one = trainer(path, tokenizer, tmp_path, monkeypatch, Liar, model=model, contract=contract)
    one.train()
    assert not bool((trl_step.ratios(one) == 1).all())


def test_another_contract_stops_the_trainer(path, tokenizer, tmp_path, monkeypatch):
    one = trainer(path, tokenizer, tmp_path, monkeypatch)
    before = copy.deepcopy(one.model.state_dict())
    ck.patch(one.vllm_generation.model, order="tree")
    with pytest.raises(ContractError, match=r"worker 0: .*\n  order of linear: chain here, tree"):
        one.train()
    assert one.state.global_step == 0
    assert all(same_bytes(before[name], t) for name, t in one.model.state_dict().items())

    class Plain(Engine):
        """vLLM without the plug-in."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            ck.unpatch(self.model)

    with pytest.raises(ContractError, match=r"formula of rms_norm: ck\.rms_norm.* here, LlamaRMS"):
        trainer(path, tokenizer, tmp_path, monkeypatch, Plain)


class Silent(Engine):
    cut = staticmethod(lambda scores: [*scores[:-1], [None]])


def test_bad_setups_are_refused_by_name(path, tokenizer, tmp_path, monkeypatch):
    def make(**changed):
        return trainer(path, tokenizer, tmp_path, monkeypatch, **changed)

    for error, words, changed in (
        (ArgumentTypeError, "contract: .*one without a model", {"contract": ck.contract("cpu")}),
        (ArgumentTypeError, "contract: .*None", {"contract": None}),
        (ArgumentValueError, r"args\.use_vllm: expected True", {"args": {"use_vllm": False}}),
        (ArgumentValueError, r"args\.bf16: expected off", {"args": {"bf16": True}}),
        (ArgumentValueError, r"logits_dtype: expected float32", {"cls": Fused, "engine": Rounded}),
    ):
        with pytest.raises(error, match=words):
            make(**changed)
    one = make()
    one.vllm_generation.mode = "elsewhere"
    with pytest.raises(ArgumentValueError, match=r"args\.vllm_mode: .*'elsewhere'"):
        trl_vllm.engine_contracts(one.vllm_generation)
    one = make(engine=Silent)
    with pytest.raises(ArgumentValueError, match="vLLM's logprobs: expected a log p for each"):
        one.train()


# ---- vLLM itself --------------------------------------------------------------------------------


@pytest.mark.nightly
def test_vllm_with_the_plug_in(tokenizer, tmp_path, monkeypatch):
    """Where vLLM, the plug-in's entry point and TRL are installed: one step, colocated."""
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    pytest.importorskip("vllm")
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 2, "head_dim": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    sizes |= {"vocab_size": trl_step.families.VOCABULARY, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": [*trl_step.ENDS], "pad_token_id": trl_step.PAD}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes | ends)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = trl_step.load(tmp_path / "model")
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128}
    given = {"model": model, "contract": ck.contract(model=model), "args": settings}
    one = trl_step.trainer(tmp_path / "model", tokenizer, tmp_path, cls=Trainer, **given)
    one.train()
    assert one.state.global_step == 1 and trl_step.all_ones(one)
    assert one.state.log_history[0]["kl"] == 0.0
