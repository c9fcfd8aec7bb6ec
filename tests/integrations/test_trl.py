"""TRL's GRPOTrainer on a patched model: one step on a CPU, from generation to the ratio."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError, ArgumentValueError, ContractError, PatchError
from cute_kernels.integrations import trl as integration
from cute_kernels.logp import api
from tests.contract import same_bytes
from tests.model.patch import families

INSTALL = "is not installed: pip install -c constraints.txt '.[trl]'"
trl = pytest.importorskip("trl", reason=f"trl {INSTALL}")
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from tests.integrations import decoder, recipe, trl_step  # noqa: E402

PLAIN = {"beta": 0.0}


# ---- one step -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True], ids=["plain", "autocast"])
def test_ratio_is_one_and_kl_is_zero(path, tokenizer, tmp_path, bf16):
    one = trl_step.trainer(path, tokenizer, tmp_path, args={"bf16": bf16})
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def called(module, args, given, output):
        if not torch.is_grad_enabled() and given.get("use_cache"):
            calls.append((given["input_ids"], output.logits))

    one.model.register_forward_hook(called, with_kwargs=True)
    before = copy.deepcopy(one.model.state_dict())
    one.train()

    trl_step.check_on_policy(one)
    for new in one.learnt:
        assert new.dtype == torch.float32 and bool((new <= 0).all()) and bool((new < 0).any())
    logged = one.state.log_history[0]
    assert logged["kl"] == 0.0 and logged["sampling/ratio_not_one"] == 0.0
    # Both kinds of padding were there, and the step was one.
    for name in ("prompt_mask", "completion_mask"):
        assert len(torch.cat([batch[name].sum(1) for batch in one.batches]).unique()) > 1
    after = one.model.state_dict()
    assert any(not same_bytes(before[name], after[name]) for name in before)
    # The first call of the model brought the prompts, each other call a token of each.
    widths = [ids.shape[1] for ids, _ in calls]
    assert widths[0] == max(batch["prompt_ids"].shape[1] for batch in one.batches)
    assert set(widths[1:]) == {1} and len(widths) > 5
    check_against_the_calls(one.batches, calls)


def check_against_the_calls(batches: list[dict], calls: list) -> None:
    """The old log p are those of the logits that generation's calls gave, in any order of rows."""
    prompts, _ = calls[0]
    drawn = torch.cat([ids for ids, _ in calls[1:]], 1)
    logits = torch.stack([z[:, -1] for _, z in calls], 1)
    for batch in batches:
        names = ("prompt_ids", "completion_ids", "completion_mask", "old_per_token_logps")
        for prompt, completion, mask, old in zip(*map(batch.get, names), strict=True):
            completion, old = completion[mask.bool()], old[mask.bool()]
            n = len(completion)
            alike = (prompts[:, -len(prompt) :] == prompt).all(1)
            alike &= (drawn[:, : n - 1] == completion[: n - 1]).all(1)
            row = int(alike.nonzero()[0])
            options = {"temperature": trl_step.TEMPERATURE}
            scored = [ck.log_probs(logits[row, t], completion[t], **options) for t in range(n)]
            assert same_bytes(torch.stack(scored), old)
            z = logits[row, :n].double() / trl_step.TEMPERATURE
            exact = z.log_softmax(-1).gather(1, completion[:, None])[:, 0]
            assert (old.double() - exact).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "bf16"), [("llama", True), ("gemma2", False)])
def test_nothing_of_a_trainers_models_is_left(tokenizer, tmp_path, family, bf16):
    """Patched before or after: TRL's head, and accelerate's forward, are around neither model."""
    path = trl_step.checkpoint(tmp_path / family, family)
    one = trl_step.trainer(path, tokenizer, tmp_path, args={"bf16": bf16}, patched=False)
    for model in (one.model, one.ref_model):
        assert "forward" not in vars(model) and not ck.patch(model, strict=True).left
    one.train()
    assert trl_step.all_ones(one) and one.state.log_history[0]["kl"] == 0.0


@pytest.mark.parametrize(
    ("family", "first", "adapter", "bf16"),
    [
        ("llama", "patch", torch.bfloat16, False),
        ("llama", "trl", torch.float32, True),
        ("llama", "patch", torch.float32, False),
        ("gemma2", "trl", torch.bfloat16, True),
    ],
)
def test_an_adapter(tokenizer, tmp_path, family, first, adapter, bf16):
    """TRL adds it, so a patch comes after.

    The adapter's B is random, as after some training.  It is fp32 after PEFT's own casts.
    """
    peft = pytest.importorskip("peft", reason=f"peft {INSTALL}")
    path = trl_step.checkpoint(tmp_path / family, family)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    given = {"peft_config": config, "args": {"bf16": bf16}}
    one = trl_step.trainer(path, tokenizer, tmp_path, patched=first == "patch", **given)
    with torch.no_grad():
        for name, parameter in one.model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.to(adapter)
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    ck.patch(one.model, strict=True)
    one.train()
    # The reference is the model without its adapter.
    assert trl_step.all_ones(one) and one.state.log_history[0]["kl"] > 0


# ---- what the comparison finds ------------------------------------------------------------------


def test_without_the_patch_ratios_are_not_one(path, tokenizer, tmp_path):
    one = trl_step.trainer(path, tokenizer, tmp_path, patched=False, unchecked=True)
    one.train()
    ratios = trl_step.ratios(one)
    assert bool((ratios != 1).any()) and bool((ratios.log().abs() < 1).all())
    tokens = [int(batch["completion_mask"].sum()) for batch in one.batches]
    shares = [(part != 1).float().mean().item() for part in ratios.split(tokens)]
    logged = one.state.log_history[0]["sampling/ratio_not_one"]
    assert logged == pytest.approx(sum(shares) / len(shares))


def without_head(net: torch.nn.Module) -> None:
    ck.patch(net.model, strict=True)


def without_norms(net: torch.nn.Module) -> None:
    ck.patch(net, norm=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, "got LlamaForCausalLM, which was not patched"),
        (without_head, "got LlamaForCausalLM, which was not patched"),
        (without_norms, r"got 7 parts left: .*layers\.0\.input_layernorm \(LlamaRMSNorm\)"),
    ],
)
def test_a_model_that_is_not_patched_is_refused(path, tokenizer, tmp_path, change, words):
    model, args = str(path), PLAIN | {"model_init_kwargs": {"dtype": "bfloat16"}}
    if change is not None:
        model, args = trl_step.load(path, patched=False), PLAIN
        change(model)
    one = trl_step.trainer(path, tokenizer, tmp_path, model=model, args=args)
    with pytest.raises(PatchError, match=rf"trainer\.model: expected a model of which .*{words}"):
        one.train()
    assert one.state.global_step == 0 and not one.batches
    ck.patch(one.model, strict=True)
    one.train()
    assert trl_step.all_ones(one)


def norm_of_lanes(one: trl_step.Trainer, lanes: Callable[[int], int]) -> None:
    """A norm that adds each row in bf16 by so many lanes, in ops that round correctly."""
    norm = one.model.model.layers[0].post_attention_layernorm
    weight, eps = norm.weight, norm.variance_epsilon

    def forward(x):
        pieces = x.square().unflatten(-1, (lanes(x.numel() // x.shape[-1]), -1)).unbind(-1)
        total = sum(sum(pieces[1:], pieces[0]).float().unbind(-1))[..., None]
        return (x.float() / (total / x.shape[-1] + eps).sqrt()).to(x.dtype) * weight

    norm.forward = forward


def the_same_lanes(one: trl_step.Trainer) -> None:
    """No mutant: the other norm alone changes no ratio."""
    norm_of_lanes(one, lambda rows: 32)


def lanes_by_rows(one: trl_step.Trainer) -> None:
    """More lanes for fewer than 16 rows, as torch's norms have them on CUDA."""
    norm_of_lanes(one, lambda rows: 2 if rows < 16 else 32)


def torchs_scores(one: trl_step.Trainer) -> None:
    """TRL's own head and log-softmax in training."""
    add_fused_lm_head(one.model, temperature=trl_step.TEMPERATURE)
    theirs = trl.GRPOTrainer._get_per_token_logps_and_entropies
    one._get_per_token_logps_and_entropies = theirs.__get__(one)


def columns(one: trl_step.Trainer) -> None:
    """Padding on the left counts as positions in training."""
    model = one.model.model
    theirs = model.forward

    def forward(*args, **given):
        if not given.get("use_cache"):
            given.pop("position_ids", None)
        return theirs(*args, **given)

    model.forward = forward


def an_odd_weight(one: trl_step.Trainer) -> None:
    """One weight of the trainer's is another than when it generated."""
    theirs = one._get_per_token_logps_and_entropies

    def scored(*args, **given):
        weight = one.model.model.layers[1].mlp.down_proj.weight
        with torch.no_grad():
            weight[3].mul_(1.125)
        return theirs(*args, **given)

    one._get_per_token_logps_and_entropies = scored


MUTANTS = (lanes_by_rows, torchs_scores, columns, an_odd_weight)


@pytest.mark.parametrize("change", [None, the_same_lanes, *MUTANTS])
def test_mutants_have_other_bytes(path, tokenizer, tmp_path, change: Callable | None):
    one = trl_step.trainer(path, tokenizer, tmp_path, args=PLAIN)
    if change is not None:
        change(one)
    old, new = trl_step.rollout(one)
    assert old.numel() > 20
    assert same_bytes(old, new) == (change not in MUTANTS)


def test_a_reference_that_is_not_patched_is_refused(path, tokenizer, tmp_path):
    one = trl_step.trainer(path, tokenizer, tmp_path)
    ck.unpatch(one.ref_model)
    with pytest.raises(PatchError, match=r"trainer\.ref_model: expected a model of which"):
        one.train()
    one.unchecked = True
    one.train()
    assert trl_step.all_ones(one) and one.state.log_history[0]["kl"] > 0


# ---- continuous batching ------------------------------------------------------------------------

PAGES = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64}
CONTINUOUS = "use_transformers_continuous_batching"
BATCHES = {CONTINUOUS: True, "transformers_continuous_batching_config": PAGES}


def test_ratio_is_one_with_continuous_batching(path, tokenizer, tmp_path, one_thread):
    one = trl_step.trainer(path, tokenizer, tmp_path, args=BATCHES)
    one.train()
    trl_step.check_on_policy(one)
    assert one.state.global_step == 1
    assert "generate_batch" not in vars(one.accelerator.unwrap_model(one.model_wrapped))


def test_other_completions_than_were_drawn_are_refused():
    fields = {"generated_tokens": [4, 5], "logprobs": [-1.0, -2.0], "error": None}
    output, before = types.SimpleNamespace(**fields), types.SimpleNamespace(return_logprobs=False)
    batches = integration._Batches(lambda **options: {"a": output})
    batches(continuous_batching_config=before)
    assert batches.logps([[4, 5]]) == [[-1.0, -2.0]] and before.return_logprobs is False
    with pytest.raises(ArgumentValueError, match="completions: expected the completions of gen"):
        batches.logps([[4, 6]])
    output.error = "no pages"
    with pytest.raises(ArgumentValueError, match=r"generate_batch: .*no pages"):
        batches(continuous_batching_config=before)


# ---- another engine -----------------------------------------------------------------------------


def engine(net: torch.nn.Module):
    """A ``rollout_func`` that generates with a model of its own, a prompt at a time, unpadded."""

    def generate(prompts: list[str], one: trl_step.Trainer) -> dict[str, list]:
        ids = [one.processing_class(prompt)["input_ids"] for prompt in prompts]
        sizes = {"ends": trl_step.ENDS, "most": trl_step.LONGEST}
        options = sizes | {"temperature": trl_step.TEMPERATURE, "rounded": True}
        drawn, scores = zip(*(decoder.complete(net, p, **options) for p in ids), strict=True)
        return {"prompt_ids": ids, "completion_ids": [*drawn], "logprobs": [*scores]}

    return generate


@pytest.fixture
def in_use(path):
    """Contracts of a process in which a patched model generated a token."""
    one = trl_step.load(path)
    with torch.no_grad():
        logits = one(torch.tensor([[5, 6, 7]])).logits[0, -1]
    ck.log_probs(logits, torch.tensor(3))
    return integration.contracts_in_use("cpu")


@pytest.fixture
def rollout(path, tokenizer, tmp_path):
    """Makes a trainer whose completions are another engine's, with these contracts."""

    def make(contracts: dict[str, str]) -> trl_step.Trainer:
        given = {"rollout_func": engine(trl_step.load(path)), "rollout_contracts": contracts}
        return trl_step.trainer(path, tokenizer, tmp_path, args=PLAIN, **given)

    return make


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_another_engine(rollout, in_use):
    assert {"linear", "rms_norm", "embedding", "block_sparse_attention"} < in_use.keys()
    assert in_use["linear"] == ck.contract_id("linear", "cpu")
    one = rollout(in_use)
    one.train()
    assert one.state.global_step == 1 and trl_step.all_ones(one)


@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_another_contract_stops_the_trainer(rollout, in_use):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    there = integration.contracts_in_use("cpu")
    torch.set_num_threads(threads)
    one = rollout(there)
    before = copy.deepcopy(one.model.state_dict())
    with pytest.raises(ContractError) as error:
        one.train()
    assert in_use["linear"] in str(error.value) and there["linear"] in str(error.value)
    after = one.model.state_dict()
    assert one.state.global_step == 0
    assert all(same_bytes(before[name], after[name]) for name in before)


def test_the_share_of_other_ratios_is_of_tokens_that_count():
    """Neither tokens of tools nor padding are the policy's."""
    shares = []
    given = {
        "completion_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 1, 1, 1]]),
        "old_per_token_logps": torch.full((1, 5), -1.0),
    }
    logps = torch.tensor([[-1.0, -2.0, -3.0, -1.0, -4.0]])
    one = types.SimpleNamespace(_log_share=lambda *share: shares.append(tuple(map(int, share[1:]))))
    for inputs in (given, given | {"tool_mask": None}):
        integration.SampledLogps._log_ratio(one, logps, inputs)
    assert shares == [(1, 3), (2, 4)]


def test_contracts():
    here = {"linear": "linear/cpu/x/1", "rms_norm": "rms_norm/cpu/x/2"}
    integration.require_same_contracts(here, dict(reversed(here.items())))
    other = here | {"linear": "linear/cpu/x/3"}
    with pytest.raises(ContractError, match=r"x/1 in the trainer, .*x/3 in the rollout") as error:
        integration.require_same_contracts(here, other)
    assert "rms_norm" not in str(error.value)
    with pytest.raises(ContractError, match=r"rms_norm: .*x/2 in the trainer, not run in the roll"):
        integration.require_same_contracts(here, {"linear": here["linear"]})
    with pytest.raises(ContractError, match=r"linear: not run in the trainer"):
        integration.require_same_contracts({"rms_norm": here["rms_norm"]}, here)


# ---- SFT, DPO and KTO put a head of TRL's own around a model -------------------------------------

WORDS = [" ".join(f"w{i}" for i in range(first, first + 9)) for first in (3, 14, 25, 36)]
ROWS = {
    "SFT": [{"text": words} for words in WORDS],
    "DPO": [{"prompt": w, "chosen": "w50 w51 w52", "rejected": "w60 w61"} for w in WORDS],
    "KTO": [{"prompt": w, "completion": w[-7:], "label": w < "w2"} for w in WORDS],
}


def other_trainer(name: str, path, folder):
    settings = {"per_device_train_batch_size": 4, "max_steps": 1, "report_to": []}
    settings |= {"use_cpu": True, "bf16": False, "save_strategy": "no"}
    return getattr(trl, f"{name}Trainer")(
        model=trl_step.load(path),
        args=getattr(trl, f"{name}Config")(output_dir=str(folder), **settings),
        train_dataset=trl_step.dataset(ROWS[name]),
        processing_class=trl_step.tokenizer(),
    )


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """The shapes of hidden states that ``ck.linear_logp`` is called with."""
    shapes, theirs = [], api.linear_logp

    def counted(hidden, *args, **options):
        shapes.append(tuple(hidden.shape))
        return theirs(hidden, *args, **options)

    monkeypatch.setattr(api, "linear_logp", counted)
    return shapes


@pytest.mark.parametrize("name", ROWS)
def test_the_report_claims_what_runs(name, path, tmp_path, calls):
    """One step is run, and its ops are compared with the report."""

    def claims_the_loss(report) -> bool:
        return any(part.by == "ck.linear_logp" for part in report.replaced)

    one = other_trainer(name, path, tmp_path)
    one.train()
    assert one.state.global_step == 1 and not calls
    report = ck.patch(one.model)
    assert not claims_the_loss(report) and not report.complete
    left = {part.part: part.known for part in report.moving}
    assert "trl.trainer.utils._fused_forward" in left["LlamaForCausalLM: loss"]
    with pytest.raises(PatchError, match="_fused_forward"):
        ck.patch(one.model, strict=True)
    # Without TRL's head forward(labels=) is ours, and the report says so.
    vars(one.model).pop("forward")
    assert claims_the_loss(ck.patch(one.model, strict=True))
    ids = torch.tensor([[3, 4, 5, 6]])
    one.model(input_ids=ids, labels=ids).loss.backward()
    assert calls == [(1, 4, 128)]


# ---- bad inputs ---------------------------------------------------------------------------------


class Base:
    """A trainer whose methods are called otherwise than TRL's 1.16."""

    def _generate_single_turn(self, prompts):
        return prompts


def derived(*bases: type) -> Callable[[], type]:
    return lambda: type("Late", bases, {})


Fused = trl_step.FusedTrainer
same, Sampled = integration.require_same_contracts, integration.SampledLogps
bare, other, rloo = derived(Sampled), derived(Sampled, Base), derived(Sampled, trl.RLOOTrainer)
late = derived(trl.GRPOTrainer, Sampled)


def made(contracts: object, cls: type = trl_step.Trainer) -> trl_step.Trainer:
    return cls(rollout_contracts=contracts)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: same([], {}), ArgumentTypeError, "trainer: .*list"),
        (lambda: same({"a": 1}, {}), ArgumentTypeError, "trainer"),
        (lambda: same({"a": "b"}, None), ArgumentTypeError, "rollout: .*NoneType"),
        (lambda: same({"a": "b"}, {}), ArgumentValueError, "rollout: .*none"),
        (lambda: bare()(), ArgumentTypeError, "SampledLogps: .*_generate_single_turn"),
        (lambda: other()(), ArgumentTypeError, r"_generate_single_turn\(prompt_ids.*TRL 1"),
        (late, ArgumentTypeError, "Late: .*before GRPOTrainer in the bases, got GRPOTrainer first"),
        (lambda: rloo()(), ArgumentTypeError, r"expected trl\.GRPOTrainer .*got RLOOTrainer"),
        (lambda: made("linear"), ArgumentTypeError, "rollout_contracts: .*str"),
        (lambda: made({}), ArgumentValueError, "rollout_contracts: .*none"),
        (
            lambda: made({"linear": "linear/cpu/x/1"}, Fused),
            ArgumentValueError,
            "rollout_contracts: expected None",
        ),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("cls", "setting", "words"),
    [
        (trl_step.Trainer, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32: expected off"),
        (trl_step.Trainer, {"bf16": True, CONTINUOUS: True}, "bf16: expected off"),
        (Fused, {"loss_type": "vespo"}, "loss_type: .*vespo"),
        (Fused, {CONTINUOUS: True}, f"args.{CONTINUOUS}: expected False"),
    ],
)
def test_refused_settings(path, tokenizer, tmp_path, cls, setting, words):
    with pytest.raises(ArgumentValueError, match=words):
        trl_step.trainer(path, tokenizer, tmp_path, cls=cls, args=PLAIN | setting)


@pytest.mark.parametrize("name", [*integration._REFUSED, *integration._REFUSED_ARGUMENTS])
def test_a_setting_that_is_gone_is_refused(path, tokenizer, tmp_path, monkeypatch, name):
    """A version of TRL without it may do the same under another name."""
    checked = {"_REFUSED": (f"{name}_renamed",), "_REFUSED_ARGUMENTS": ()}
    if name in integration._REFUSED_ARGUMENTS:
        checked = {"_REFUSED": (), "_REFUSED_ARGUMENTS": (f"{name}_renamed",)}
    for attribute, names in checked.items():
        monkeypatch.setattr(integration, attribute, names)
    with pytest.raises(ArgumentTypeError, match=f"{name}_renamed: expected a setting"):
        trl_step.trainer(path, tokenizer, tmp_path, args=PLAIN)


@pytest.mark.parametrize("kwargs", [{"num_beams": 2}, {"prefill_chunk_size": 4}])
def test_refused_ways_to_generate(path, tokenizer, tmp_path, kwargs):
    args = PLAIN | {"generation_kwargs": kwargs}
    one = trl_step.trainer(path, tokenizer, tmp_path, args=args)
    with pytest.raises(ArgumentValueError, match="generation_kwargs: expected one call"):
        trl_step.rollout(one)


@pytest.mark.parametrize("cls", [trl_step.Trainer, Fused])
def test_images_are_refused(path, tokenizer, tmp_path, cls):
    one = trl_step.trainer(path, tokenizer, tmp_path, cls=cls, args=PLAIN)
    ids = families.ids(2, 9)
    given, mask = {"pixel_values": torch.randn(2, 3, 4, 4)}, torch.ones_like(ids)
    with pytest.raises(ArgumentValueError, match="pixel_values: expected text alone"):
        if cls is Fused:
            one._compute_loss(one.model, given)
        else:
            one._get_per_token_logps_and_entropies(one.model, ids, mask, 4, **given)


# ---- the documentation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "beta"), [("docs/integrations.md", 0.1), ("docs/policy_loss.md", 0.0)]
)
def test_the_recipe_runs(path, tokenizer, tmp_path, page, beta):
    data = trl_step.dataset(trl_step.prompts())
    names = {"path": path, "tokenizer": tokenizer, "reward": trl_step.reward, "dataset": data}
    names |= {"ck": ck, "trl": trl, "model": trl_step.load(path, patched=False)}
    names["settings"] = trl_step.settings(tmp_path, beta=beta)
    logged = recipe.run_block(page, "TRL", **names)["trainer"].state.log_history[0]
    assert logged["sampling/ratio_not_one"] == 0.0 and logged.get("kl", 0.0) == 0.0
