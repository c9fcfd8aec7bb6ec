"""Parts of the vLLM plug-in that need no vLLM: what asks for it, refusals, the walk, log-probs."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import types
import warnings

import pytest
import torch

import cute_kernels as ck
from cute_kernels import settings
from cute_kernels.errors import (
    ArgumentValueError,
    BackendUnavailable,
    ContractError,
    PatchError,
)
from cute_kernels.integrations import contract_exchange as exchange
from cute_kernels.integrations.vllm import (
    interface,
    loading,
    model_check,
    plugin,
    ranks,
    refusals,
    releases,
)
from tests.ranks import ROOT

PLUGIN = "cute_kernels.integrations.vllm"


namespace = types.SimpleNamespace


def changed(parts: types.SimpleNamespace, changes: dict[str, object]) -> types.SimpleNamespace:
    """Set attributes that are named by their paths."""
    for path, value in changes.items():
        *folders, name = path.split(".")
        setattr(functools.reduce(getattr, folders, parts), name, value)
    return parts


def config(changes: dict[str, object] | None = None) -> types.SimpleNamespace:
    """Return a VllmConfig of a model that is taken, but for the changes."""
    parts = namespace(
        model_config=namespace(
            architectures=["LlamaForCausalLM"],
            hf_config=namespace(vocab_size=32000),
            quantization=None,
            use_mla=False,
            dtype=torch.bfloat16,
            logprobs_mode="raw_logprobs",
            max_logprobs=20,
            runner_type="generate",
        ),
        parallel_config=namespace(pipeline_parallel_size=1, tensor_parallel_size=1),
        additional_config={"cute_kernels": True},
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
        cache_config=namespace(cache_dtype="auto"),
        load_config=namespace(load_format="auto"),
        compilation_config=namespace(mode=0),
        attention_config=namespace(backend=None),
    )
    return changed(parts, changes or {})


NEXT = "Qwen3NextForCausalLM"


def mixture(name: str) -> types.SimpleNamespace:
    """Return a VllmConfig of a mixture that is taken."""
    fixed = {entry: values[0] for entry, values in refusals.FIXED[name].items()}
    hf_config = namespace(vocab_size=32000, num_experts=64, **fixed)
    return config({"model_config.architectures": [name], "model_config.hf_config": hf_config})


HF, PARALLEL = "model_config.hf_config", "parallel_config"
ROTARY = {"partial_rotary_factor": 0.5}
MIXTRAL, OLMOE, QWEN3 = "MixtralForCausalLM", "OlmoeForCausalLM", "Qwen3MoeForCausalLM"
#: Mixture or None: a Llama; what is changed; its value; the name that its refusal begins with.
REFUSED = [
    (None, "model_config.quantization", "fp8", "quantization"),
    (None, "model_config.use_mla", True, "model"),
    (None, f"{HF}.num_experts", 8, "model"),
    (None, "model_config.architectures", ["MambaForCausalLM"], "architecture"),
    (None, "model_config.dtype", torch.float32, "dtype"),
    (None, "model_config.logprobs_mode", "raw_logits", "logprobs_mode"),
    (None, "model_config.max_logprobs", -1, "max_logprobs"),
    (None, "model_config.runner_type", "pooling", "runner"),
    (None, f"{PARALLEL}.pipeline_parallel_size", 2, "pipeline_parallel_size"),
    (None, f"{PARALLEL}.tensor_parallel_size", 3, "tensor_parallel_size"),
    (None, "speculative_config", namespace(), "speculative_config"),
    (None, "lora_config", namespace(), "lora_config"),
    (None, "kv_transfer_config", namespace(), "kv_transfer_config"),
    (None, "cache_config.cache_dtype", "fp8_e4m3", "kv_cache_dtype"),
    (None, f"{PARALLEL}.distributed_executor_backend", "ray", "distributed_executor_backend"),
    (None, f"{PARALLEL}.data_parallel_backend", "ray", "data_parallel_backend"),
    (None, f"{PARALLEL}.enable_batch_sharded_sampling", True, "enable_batch_sharded_sampling"),
    (None, "kernel_config", namespace(linear_backend="cutlass"), "linear_backend"),
    (None, "watermark_config", namespace(), "watermark_config"),
    (None, f"{HF}.partial_rotary_factor", 0.5, "model: partial_rotary_factor"),
    (None, f"{HF}.rope_parameters", {"full": ROTARY}, "model: partial_rotary_factor"),
    (None, "load_config.load_format", "tensorizer", "load_format"),
    (None, "compilation_config.mode", 3, "compilation_config"),
    (None, "attention_config.backend", namespace(name="FLASH_ATTN"), "attention_backend"),
    (QWEN3, f"{PARALLEL}.tensor_parallel_size", 2, "tensor_parallel_size"),
    (QWEN3, f"{PARALLEL}.data_parallel_size", 2, "data_parallel_size"),
    (QWEN3, f"{PARALLEL}.enable_expert_parallel", True, "enable_expert_parallel"),
    (QWEN3, f"{PARALLEL}.enable_eplb", True, "enable_eplb"),
    (QWEN3, "kernel_config", namespace(moe_backend="triton"), "moe_backend"),
    (QWEN3, "additional_config", {"cute_kernels": {"order": "tree"}}, "order"),
    (QWEN3, f"{HF}.use_sliding_window", True, "model: use_sliding_window"),
    (OLMOE, f"{HF}.clip_qkv", 8.0, "model: clip_qkv"),
    (OLMOE, f"{HF}.rms_norm_eps", 1e-6, "model: rms_norm_eps"),
    (OLMOE, f"{HF}.norm_topk_prob", True, "model: norm_topk_prob"),
    (MIXTRAL, f"{HF}.hidden_act", "gelu", "model: hidden_act"),
    (MIXTRAL, "model_config.architectures", ["GptOssForCausalLM"], "model"),
]


@pytest.mark.parametrize(("model", "path", "value", "name"), REFUSED)
def test_a_configuration_that_breaks_a_promise_is_refused_by_name(model, path, value, name):
    taken = config() if model is None else mixture(model)
    refusals.check_config(taken, "cpu")
    with pytest.raises(ArgumentValueError, match=rf"^{name}: expected .*, got ") as error:
        refusals.check_config(changed(taken, {path: value}), "cpu")
    assert "\n" not in str(error.value)


def test_every_mixture_has_a_rule_and_others_are_refused_by_name():
    assert set(refusals.ROUTERS) == set(refusals.FIXED) - (set(refusals.HYBRIDS) - {NEXT})
    for name in refusals.ROUTERS:
        rule = refusals.router_rule(namespace(architectures=[name]), normalize=False)
        assert rule.normalize == (name == MIXTRAL)  # it divides, whatever its config says
    with pytest.raises(PatchError, match=r"^model: expected .*, got GptOssForCausalLM"):
        refusals.router_rule(namespace(architectures=["GptOssForCausalLM"]), normalize=False)


def hybrid(name: str, **cache: object) -> types.SimpleNamespace:
    """Return a VllmConfig of a hybrid that is taken, with entries of its ``cache_config``."""
    cache = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "block_size": 16} | cache
    parts = mixture(name)
    parts.model_config.hf_config.num_experts = 0
    parts.cache_config = namespace(
        cache_dtype="auto", mamba_ssm_cache_dtype="auto", user_specified_block_size=False, **cache
    )
    return parts


@pytest.mark.parametrize("name", refusals.HYBRIDS)
def test_prefixes_of_hybrids_end_with_a_chunk_or_are_refused(name):
    chunk = 64 if name == NEXT else 128
    config = hybrid(name, mamba_cache_mode="all")
    releases.set_hybrid_defaults(config)
    refusals.check_config(config, "cpu")
    cache = config.cache_config
    assert (cache.mamba_cache_mode, cache.block_size) == ("align", chunk)
    assert cache.mamba_ssm_cache_dtype == "float32"
    config = hybrid(name, block_size=2 * chunk)
    releases.set_hybrid_defaults(config)
    assert config.cache_config.block_size == 2 * chunk
    config.cache_config.user_specified_block_size = True
    config.cache_config.block_size = chunk // 2
    with pytest.raises(ArgumentValueError, match=rf"^block_size: expected a multiple of {chunk}"):
        releases.set_hybrid_defaults(config)
    config.cache_config.enable_prefix_caching = False
    releases.set_hybrid_defaults(config)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("parallel_config.tensor_parallel_size", 2),
        ("cache_config.mamba_cache_mode", "all"),
        ("cache_config.use_replayssm", True),
    ],
)
def test_what_no_hybrid_can_be_served_with_is_refused_by_name(setting, value):
    config = changed(hybrid(NEXT), {setting: value})
    with pytest.raises(ArgumentValueError, match=rf"^{setting.split('.')[1]}: expected"):
        refusals.check_config(config, "cpu")


def test_a_configuration_that_is_covered_is_taken():
    custom = {"attention_config.backend": namespace(name="CUSTOM")}
    refusals.check_config(config(custom), "cuda")
    for backend in ("uni", "mp", "external_launcher"):
        changes = {f"{PARALLEL}.distributed_executor_backend": backend}
        refusals.check_config(config(changes | {"cache_config.cache_dtype": "bfloat16"}), "cpu")
    with pytest.raises(ArgumentValueError, match=r"^attention_backend: "):
        refusals.check_config(config(), "cuda")  # the defaults had to choose it


RUN = releases.Release("0.32.0+cpu", "cpu", "2.13.1+cpu")
CUDA = {"vllm": "0.25.1", "device": "cuda", "torch": "2.11.0+cu130"}


@pytest.mark.parametrize(
    ("change", "known"),
    [({}, True), (CUDA, True), (CUDA | {"vllm": "0.25.10"}, False), ({"torch": "2.1.0"}, False)],
)
def test_a_release_that_fits_and_was_not_run_is_taken_with_a_warning(monkeypatch, change, known):
    release = RUN._replace(**change)
    monkeypatch.setattr(releases, "here", lambda: release)
    monkeypatch.setattr(releases, "device_type", lambda: release.device)
    monkeypatch.setattr(interface, "find_misfits", lambda device: iter(()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        releases.check()
    assert len(caught) == (not known)
    assert releases.statement().startswith(f"vllm {release.vllm} on {release.device} with torch")
    assert releases.statement().endswith(": run" if known else ": fits, not run")


class Engine:
    """A place of an engine."""

    field: int

    def __init__(self, first, *, second=None) -> None:
        self.set_here = first

    def step(self, logits, mode=None) -> None:
        self.other = mode

    @staticmethod
    def divide(logits, temp) -> None: ...


GOT = "got (self, logits, mode)"


@pytest.mark.parametrize(
    ("name", "want", "misfit"),
    [
        ("Engine.__init__", "(self first second)", None),
        ("Engine.step", "(self logits *)", None),
        ("Engine.step", "(self logits [mode])", None),
        ("Engine.walk|Engine.divide", "(logits temp)", None),
        ("Engine", "field set_here step", None),
        ("Engine.step", "(self logits)", f"parameters (self, logits), {GOT}"),
        ("Engine.step", "(self rows *)", f"parameters (self, rows, *), {GOT}"),
        ("Engine.divide", "([x] y)", "parameters ([x], y), got (logits, temp)"),
        ("Engine.walk", "(self)", "parameters (self), got nothing of that name"),
        ("Engine", "field other", "field, other, got no other"),
        ("Machine", "field", "field, got no field"),
    ],
)
def test_a_place_of_another_interface_is_named(name, want, misfit):
    line = f"{name}{want}" if want.startswith("(") else f"{name}: {want}"
    table = interface.read_table(f"{__name__}\n    {line}\n")
    lines = list(interface.find_misfits("cpu", table))
    full = f"{__name__}.{name.replace('|', ' or ')}"
    assert lines == ([] if misfit is None else [f"{full}: expected {misfit}"])
    absent = table[0]._replace(module="no_such_module_of_vllm")
    assert len(list(interface.find_misfits("cpu", (absent,)))) == 1
    assert not list(interface.find_misfits("cpu", (absent._replace(device="cuda"),)))


def test_several_ranks_have_an_order_that_they_can_share():
    def order(degree: int, value: object) -> str:
        changes = {f"{PARALLEL}.tensor_parallel_size": degree}
        return ranks.order_of(config(changes | {"additional_config": {"cute_kernels": value}}))

    assert [order(1, True), order(2, True)] == ["chain", "tree"]
    assert [order(1, {"order": "tree"}), order(8, {"order": "tree"})] == ["tree", "tree"]
    for degree, name in ((1, "bush"), (2, "chain")):
        with pytest.raises(ArgumentValueError, match=r"^order: expected .*, got "):
            order(degree, {"order": name})


# ---- what asks for the plug-in -------------------------------------------------------------------


def test_nothing_is_imported_unless_asked():
    code = (
        "import sys\n"
        "from cute_kernels.integrations.vllm import plugin\n"
        "plugin.register()\n"
        "found = [m for m in ('torch', 'vllm', 'triton', 'cutlass') if m in sys.modules]\n"
        "assert not found, found\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_KERNELS")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


class EngineArgs:
    """vLLM's arguments of an engine, as far as `plugin.watch` uses them."""

    def __init__(self, additional_config: object = None, mode: object = None) -> None:
        self.additional_config, self.enforce_eager = additional_config, False
        self.compilation_config = namespace(mode=mode)

    def create_engine_config(self, usage=None):
        return "config", usage


@pytest.fixture
def engine_args(monkeypatch):
    """`EngineArgs` in vLLM's module, of a process that has not asked for the plug-in."""
    fresh = type("EngineArgs", (EngineArgs,), {})
    module = types.ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = fresh
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "0")
    monkeypatch.setattr(settings, "reload", lambda: None)  # tests read settings afresh
    return fresh


def test_the_engine_is_left_alone_unless_its_arguments_ask(engine_args):
    plugin.register()
    watched = engine_args.create_engine_config
    plugin.watch(engine_args)
    assert engine_args.create_engine_config is watched
    for additional in ({}, {"cute_kernels": False}, {"others": "off"}, None):
        assert engine_args(additional).create_engine_config("serve") == ("config", "serve")
    assert os.environ["CUTE_KERNELS_VLLM"] == "0"


@pytest.mark.parametrize("variable", ["yes", "1", "0"])
def test_a_refused_engine_stays_refused_in_the_process(monkeypatch, engine_args, variable):
    """vLLM calls the entry point once, whatever it raises: the second engine must not be stock."""
    monkeypatch.setattr(releases, "device_type", lambda: "cpu")
    monkeypatch.setattr(interface, "find_misfits", lambda device: iter(["a.b: expected c, got d"]))
    monkeypatch.setenv("CUTE_KERNELS_VLLM", variable)
    if variable != "0":
        with pytest.raises((settings.SettingError, BackendUnavailable)):
            plugin.register()
    else:
        plugin.register()
    asks = {"cute_kernels": True} if variable == "0" else None
    for _ in range(2):
        with pytest.raises((settings.SettingError, BackendUnavailable)):
            engine_args(asks).create_engine_config()
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "1")
    with pytest.raises(BackendUnavailable, match=r"^a\.b: "):
        engine_args().create_engine_config()
    monkeypatch.setattr(interface, "find_misfits", lambda device: iter(()))
    activated = []
    monkeypatch.setattr(plugin, "activate", lambda: activated.append(True))
    for name in ("set_defaults", "set_hybrid_defaults"):
        monkeypatch.setattr(releases, name, lambda given: None)
    monkeypatch.setattr(refusals, "check_config", lambda config, device: activated.append(config))
    assert engine_args().create_engine_config() == ("config", None)
    assert activated == [True, ("config", None)]


VALUE, CONFIG = "additional_config['cute_kernels']", "additional_config"


WANT = "expected True, False"


@pytest.mark.parametrize(
    ("additional", "is_on", "begins"),
    [
        ({"cute_kernels": "off"}, False, f"{VALUE}: {WANT}"),
        ({"cute_kernels": 1}, False, f"{VALUE}: {WANT}"),
        ({"cute_kernels": {}}, False, f"{VALUE}: {WANT}"),
        ({"cute_kernels": {"ordr": "tree"}}, False, f"option of {VALUE}"),
        ({"cute_kernels": False}, True, f"{VALUE}: expected no False"),
        ({"cute_kernel": True}, False, f"{CONFIG}: expected the key 'cute_kernels', got 'c"),
        ({"CuteKernels": {}}, True, f"{CONFIG}: expected the key 'cute_kernels', got 'Cut"),
    ],
)
def test_what_asks_unclearly_is_refused_by_name(additional, is_on, begins):
    with pytest.raises(ArgumentValueError) as error:
        plugin.asked_for(additional, is_on)
    assert str(error.value).startswith(begins)


def test_what_asks_clearly_is_heard():
    assert plugin.asked_for({"cute_kernels": True, "acute_kernels_of_others": 1}, False)
    assert plugin.asked_for({"cute_kernels": {"order": "tree"}}, False)
    assert plugin.asked_for({"others": 1}, True) and plugin.asked_for(None, True)


def test_arguments_that_vllm_changes_are_refused_as_the_user_gave_them():
    args = EngineArgs(mode=3)
    for changes, said in (
        ({}, r"^compilation_config: expected .*, got mode 3$"),
        (
            {"enforce_eager": True, "distributed_executor_backend": "ray"},
            "^distributed.*, got ray$",
        ),
        ({"compilation_config": 3}, r"^compilation_config: expected .*, got 3$"),
    ):
        vars(args).update(changes)
        with pytest.raises(ArgumentValueError, match=said):
            refusals.check_arguments(args)


# ---- the built model -----------------------------------------------------------------------------


def of_module(name: str, *bases: type) -> type:
    return type("Part", bases or (torch.nn.Module,), {"__module__": name})


def test_a_part_that_is_not_ours_is_named():
    model = of_module("vllm.model_executor.models.llama")()
    model.layers = torch.nn.ModuleList([of_module("cute_kernels.integrations.vllm.layers")()])
    model.layers[0].inside = torch.nn.Linear(4, 4)  # not called by ours
    assert model_check.find_unknown(model) == []
    model.layers.append(torch.nn.Linear(4, 4))
    with pytest.raises(PatchError, match=r"^model: layers\.1: .*torch\.nn\.modules\.linear"):
        model_check.check_model(model)
    model.layers[1] = of_module("vllm.model_executor.models.gpt_oss")()
    assert [name for name, _ in model_check.find_unknown(model)] == ["layers.1"]
    model.layers[1] = of_module("vllm.model_executor.models.llama")()
    model.layers[1].scale = torch.nn.Parameter(torch.ones(2))
    assert "parameter scale" in model_check.find_unknown(model)[0][1]
    model.layers[1] = of_module("vllm.model_executor.layers.attention")()
    model.layers[1].attn_backend = of_module("vllm.v1.attention.backends.flash_attn", object)
    assert [name for name, _ in model_check.find_unknown(model)] == ["layers.1"]


def test_an_engine_without_the_plug_in_is_called_stock(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(releases, "statement", lambda: "vllm 0.33.0 on cpu: fits, not run")
    model = of_module("vllm.model_executor.models.llama")()
    model.proj = torch.nn.Linear(4, 4)
    stock = exchange.worker_contract(namespace(model_runner=namespace(model=model)))
    assert stock["engine"] == "stock vllm 0.32.0"
    trainer = ck.contract("cpu", model=torch.nn.ReLU(), dtype=torch.float32)
    with pytest.raises(ContractError, match=r"^worker 0: engine: .*, got stock vllm 0\.32"):
        exchange.require_engine(trainer, [stock])
    model.norm = of_module(f"{PLUGIN}.pointwise")()
    ours = exchange.engine_contract(model)
    assert ours.engine == "vllm 0.33.0 on cpu: fits, not run"
    assert ours == dataclasses.replace(ours, engine=None)
    assert ours.id == dataclasses.replace(ours, engine=None).id
    assert exchange.engine_contract(torch.nn.Linear(4, 4)).engine is None
    assert ck.Contract.from_dict(ours.to_dict()).engine == ours.engine


class LoadedModel(torch.nn.Module):
    """A model whose `load_weights` is vLLM's: biases without a parameter are dropped."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.config = namespace(tie_word_embeddings=tied)
        self.norm = torch.nn.Linear(4, 1)
        self.proj = torch.nn.Linear(4, 3)

    def load_weights(self, weights) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            if name in parameters:
                parameters[name].data.copy_(weight)
                loaded.add(name)
        return loaded


@pytest.mark.parametrize(
    ("change", "tied", "refused"),
    [
        ({}, False, None),
        ({"lm_head.weight": (3, 4)}, True, None),
        ({"rotary_emb.inv_freq": (2,)}, False, None),
        ({"lm_head.weight": (3, 4)}, False, r"none for lm_head\.weight$"),
        ({"o_proj.bias": (4,), "q.bias": (1,)}, False, r"none for o_proj\.bias, and 1 more$"),
        ({"proj.bias": None}, False, r"none for proj\.bias$"),
        ({"proj.bias": None, "norm.bias": None}, False, r"none for norm\.bias, and 1 more$"),
    ],
)
def test_tensors_and_parameters_that_one_side_lacks_are_named(change, tied, refused):
    model = LoadedModel(tied=tied)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()} | change
    loading.watch(model)

    def load() -> set[str]:
        # Each tensor is freed before the next is made, which may have its address.
        given = ((name, torch.randn(shape)) for name, shape in shapes.items() if shape)
        loaded = model.load_weights(given)
        loaded |= set(shapes)  # as vLLM does with what it does not ask for
        getattr(model, loading.CHECK)()
        return loaded

    for _ in range(2):
        if refused is None:
            load()
            continue
        with pytest.raises(PatchError, match=f"^model: expected .* LoadedModel, got .*{refused}"):
            load()


def test_an_object_at_the_address_of_a_freed_tensor_is_not_the_tensor():
    uses, freed, other = loading._Uses(), torch.ones(1), torch.ones(1)
    assert len(list(uses.watch([("a", freed)]))) == 1
    uses._by_id[id(other)] = uses._by_id.pop(id(freed))
    with uses:
        other.neg()
    assert list(uses.unused) == ["a"]


def test_a_part_of_the_weights_may_be_loaded_by_itself():
    model = LoadedModel()
    loading.watch(model)
    assert model.load_weights([("norm.bias", torch.ones(1))]) == {"norm.bias"}


def test_a_model_whose_device_has_our_ops_has_their_contracts():
    paged = ck.contract_id("paged_attention", "cpu", torch.bfloat16)
    ids = model_check.contract_ids(torch.device("cpu"), torch.bfloat16)
    assert ids["paged_attention"] == paged
    assert set(ids) == set(model_check.OPS)
    more = model_check.contract_ids(torch.device("cpu"), torch.bfloat16, model_check.MIXTURE_OPS)
    assert set(more) == {"grouped_linear", "moe", "sigmoid"}


def test_a_mixture_needs_the_ops_of_experts(monkeypatch):
    model = of_module("vllm.model_executor.models.mixtral")()
    model.experts = of_module(f"{PLUGIN}.mixtures")()
    model.experts.w2_weight = torch.nn.Parameter(torch.zeros(2, 4, 4))
    asked = []
    monkeypatch.setattr(model_check, "contract_ids", lambda device, dtype, ops: asked.append(ops))
    monkeypatch.setattr(model_check, "_checked", False)
    model_check.check_model(model)
    model.experts.cute_kernels_part = exchange.experts_part()
    model_check.check_model(model)
    more = [set(ops) - set(model_check.OPS) for ops in asked]
    assert more == [set(), set(model_check.MIXTURE_OPS)]
