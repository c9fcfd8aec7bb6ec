"""The interface of vLLM that the plug-in relies on, as one table that is compared at start.

A line of `TABLE` is a function that the plug-in replaces, overrides or calls, with its parameters'
names in order; or a class and the fields, attributes or members that it reads.  A release that
differs is refused by the name of the place.  Constructors of layers are listed with all their
parameters: an option that is not known here could change what the layer computes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import expected


class Place(NamedTuple):
    """A function or a class of vLLM's.

    Attributes:
        module, name: Where it is; "a|b" says that either name is enough.
        parameters: Of a function: ``[x]`` may be absent, ``*`` stands for any further ones.
        attributes: Of a class, where ``parameters`` is None.
        device: Of vLLM's platform; "": of all.
    """

    module: str
    name: str
    parameters: str | None
    attributes: str | None
    device: str


def read_table(text: str) -> tuple[Place, ...]:
    """Return the places of a text like `TABLE`'s: modules, each with functions and classes."""
    places = []
    for module, device, body in re.findall(r"^(\S+)(?: on (\w+))?\n((?: .*\n)+)", text, re.M):
        for line in body.replace("\n        ", " ").splitlines():
            match = re.fullmatch(r"    ([\w.|]+)(?:\((.*)\)|: (.*))", line)
            places.append(Place(module, *match.groups(), device))
    return tuple(places)


# The shape of a cache is the backend's, or [pages, Hkv, page size, 2 D] with any strides.
TABLE = read_table("""\
vllm.engine.arg_utils
    EngineArgs.create_engine_config(self usage_context *)
vllm.config
    CompilationMode: NONE
    CUDAGraphMode: FULL_DECODE_ONLY
    get_current_vllm_config()
vllm.distributed
    get_tp_group()
vllm.forward_context
    get_forward_context()
    is_forward_context_available()
vllm.model_executor.custom_op
    PluggableLayer.register_oot(_decorated_layer_cls name)
    CustomOp.register_oot(_decorated_op_cls name)
vllm.model_executor.model_loader.base_loader
    BaseModelLoader.load_model(self vllm_config model_config prefix)
    initialize_model(vllm_config prefix model_class model_config)
vllm.v1.attention.backends.registry
    register_backend(backend class_path *)
    AttentionBackendEnum: CUSTOM CPU_ATTN
vllm.v1.attention.backend
    AttentionType: DECODER
    AttentionCGSupport: ALWAYS UNIFORM_SINGLE_TOKEN_DECODE
    CommonAttentionMetadata: num_reqs num_actual_tokens query_start_loc query_start_loc_cpu
        max_query_len seq_lens block_table_tensor causal
    AttentionMetadataBuilder.__init__(self kv_cache_spec layer_names vllm_config device)
    AttentionMetadataBuilder.build(self common_prefix_len common_attn_metadata fast_build)
    AttentionImpl.__init__(self num_heads head_size scale num_kv_heads alibi_slopes sliding_window
        kv_cache_dtype logits_soft_cap attn_type kv_sharing_target_layer_name)
    AttentionImpl.forward(self layer query key value kv_cache attn_metadata output output_scale
        output_block_scale)
vllm.v1.attention.backends.cpu_attn on cpu
    CPUAttentionBackendImpl.do_kv_cache_update(self layer key value kv_cache slot_mapping)
vllm.v1.attention.backends.triton_attn on cuda
    TritonAttentionImpl.do_kv_cache_update(self layer key value kv_cache slot_mapping)
vllm.v1.attention.backend
    AttentionBackend.get_kv_cache_shape|AttentionBackend.supported_kv_cache_layouts([num_blocks]
        [block_size] [num_kv_heads] [head_size] [cache_dtype_str])
vllm.model_executor.layers.linear
    UnquantizedLinearMethod.apply(self layer x bias)
    UnquantizedLinearMethod.process_weights_after_loading(self layer)
    ReplicatedLinear.forward(self x)
    ColumnParallelLinear.forward(self input_)
    RowParallelLinear.forward(self input_)
    RowParallelLinear.__init__(self input_size output_size bias input_is_parallel skip_bias_add
        params_dtype reduce_results quant_config prefix return_bias disable_tp)
vllm.model_executor.layers.vocab_parallel_embedding
    UnquantizedEmbeddingMethod.embedding(self layer input_)
    UnquantizedEmbeddingMethod.apply(self layer x bias)
    VocabParallelEmbedding.forward(self input_)
    VocabParallelEmbedding.__init__(self num_embeddings embedding_dim params_dtype
        org_num_embeddings padding_size quant_config prefix [disable_tp] [reduce_results]
        [quant_method] [parallel_group])
    VocabParallelEmbedding: tp_size shard_indices quant_method
vllm.model_executor.layers.logits_processor
    LogitsProcessor.__init__(self vocab_size org_vocab_size scale logits_as_input soft_cap)
    LogitsProcessor._get_logits(self hidden_states lm_head embedding_bias [skip_gather])
    LogitsProcessor._gather_logits(self logits)
    LogitsProcessor: scale soft_cap org_vocab_size
vllm.model_executor.layers.layernorm
    RMSNorm.__init__(self hidden_size eps var_hidden_size has_weight dtype)
    RMSNorm.forward_native(self x residual)
    RMSNorm: variance_size_override has_weight variance_epsilon
    GemmaRMSNorm.__init__(self hidden_size eps)
    GemmaRMSNorm.forward_native(self x residual)
    GemmaRMSNorm: variance_epsilon
vllm.model_executor.layers.activation
    SiluAndMul.__init__(self compile_native)
    GeluAndMul.__init__(self approximate)
    ReLUSquaredActivation.forward_native(self x)
vllm.model_executor.layers.rotary_embedding.base
    RotaryEmbedding.__init__(self head_size rotary_dim max_position_embeddings base is_neox_style
        dtype init_cache)
    RotaryEmbedding.forward_native(self positions query key)
    RotaryEmbedding._compute_inv_freq(self base)
vllm.model_executor.layers.rotary_embedding.llama3_rope
    Llama3RotaryEmbedding._compute_inv_freq(self base)
vllm.model_executor.layers.rotary_embedding.linear_scaling_rope
    LinearScalingRotaryEmbedding: scaling_factors
vllm.model_executor.layers.fused_moe.router.gate_linear
    GateLinear.__init__(self input_size output_size bias out_dtype params_dtype force_fp32_compute
        [skip_bias_add] [quant_config] prefix [return_bias])
    GateLinear.forward(self x)
vllm.model_executor.layers.fused_moe.router.base_router
    BaseRouter.__init__(self top_k global_num_experts eplb_state)
    BaseRouter._compute_routing(self hidden_states router_logits indices_type input_ids)
vllm.model_executor.layers.fused_moe.routed_experts
    RoutedExperts.__init__(self layer_name params_dtype moe_config quant_config expert_map_manager
        ckpt_gate_proj_name ckpt_down_proj_name ckpt_up_proj_name [is_fused_checkpoint_transposed]
        renormalize use_grouped_topk num_expert_group topk_group custom_routing_function
        scoring_func routed_scaling_factor swiglu_limit swiglu_alpha swiglu_beta
        e_score_correction_bias apply_router_weight_on_input [hash_indices_table])
    RoutedExperts._get_quant_method(self prefix quant_config moe_config)
vllm.model_executor.layers.fused_moe.fused_moe_method_base
    FusedMoEMethodBase.apply(self layer x topk_weights topk_ids shared_experts
        shared_experts_input)
    FusedMoEMethodBase.get_fused_moe_quant_config(self layer)
vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method
    UnquantizedFusedMoEMethod.create_weights(self layer num_experts hidden_size
        intermediate_size_per_partition params_dtype extra_weight_attrs)
vllm.model_executor.layers.fused_moe.runner.moe_runner
    MoERunner.__init__(self layer_name moe_config router routed_experts enable_dbo gate
        shared_experts shared_expert_gate routed_input_transform routed_output_transform
        routed_scaling_factor)
vllm.model_executor.layers.mamba.abstract
    MambaBase.get_attn_backend(self)
    MambaBase.get_kv_cache_spec(self vllm_config)
vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn
    QwenGatedDeltaNetAttention.__init__(self config vllm_config prefix gqa_interleaved_layout
        [reduce_results])
    QwenGatedDeltaNetAttention.forward(self hidden_states [output])
vllm.model_executor.layers.mamba.mamba_mixer2
    MambaMixer2.__init__(self hidden_size ssm_state_size conv_kernel_size intermediate_size
        use_conv_bias use_bias n_groups num_heads head_dim rms_norm_eps activation use_rms_norm
        model_config cache_config quant_config prefix)
    MambaMixer2.forward(self hidden_states mup_vector)
vllm.model_executor.models.qwen3_next
    Qwen3NextAttention._project_qkv_gate(self qkv positions)
    Qwen3NextAttention.forward(self positions [output] hidden_states)
vllm.v1.core.sched.output
    SchedulerOutput: scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
        finished_req_ids preempted_req_ids
    NewRequestData: req_id block_ids num_computed_tokens
    CachedRequestData: req_ids resumed_req_ids new_block_ids num_computed_tokens
vllm.v1.worker.gpu_worker
    Worker.execute_model(self scheduler_output)
vllm.v1.outputs
    LogprobsTensors: logprob_token_ids logprobs selected_token_ranks
vllm.v1.sample.metadata
    SamplingMetadata: temperature logitsprocs
vllm.v1.sample.sampler
    Sampler.__init__(self logprobs_mode use_fp64_gumbel)
    Sampler.sample(self logits sampling_metadata *)
    Sampler.apply_temperature(logits temp all_random)
    Sampler.compute_logprobs(logits)
    Sampler.gather_logprobs(logprobs num_logprobs token_ids)
    Sampler.gather_specific_token_logprobs(self logprobs logprob_token_ids sampled)
vllm.v1.sample.ops.topk_topp_sampler
    TopKTopPSampler.__init__(self logprobs_mode use_fp64_gumbel)
vllm.v1.sample.logits_processor
    LogitsProcessors: argmax_invariant
vllm.v1.worker.gpu.sample.logprob on cuda
    compute_token_logprobs(logits token_ids)
vllm.v1.worker.gpu.sample.sampler on cuda
    compute_topk_scores|compute_topk_logprobs(logits num_logprobs sampled_token_ids *)
    Sampler.sample(self logits expanded_idx_mapping *)
    Sampler: logprobs_mode sampling_states
vllm.v1.worker.gpu.sample.states on cuda
    SamplingStates.apply_temperature(self logits *)
    SamplingStates: temperature
""")


def find_misfits(device: str, table: tuple[Place, ...] = TABLE) -> Iterator[str]:
    """Yield a line for each place of the table that this vLLM has otherwise."""
    for place in table:
        misfit = _misfit(place) if place.device in ("", device) else None
        if misfit is not None:
            yield expected(f"{place.module}.{place.name.replace('|', ' or ')}", *misfit)


def resolve(module: str, name: str) -> object:
    """Return what a module has under a dotted name; of "a|b" the first one; None: it has none."""
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    for alternative in name.split("|"):
        value: object = home
        for part in alternative.split("."):
            value = getattr(value, part, None)
        if value is not None:
            return value
    return None


def _misfit(place: Place) -> tuple[str, str] | None:
    """Return what a place has to be and what it is; None: it fits."""
    value = resolve(place.module, place.name)
    if place.parameters is None:
        wanted = place.attributes.split()
        absent = [name for name in wanted if value is None or name not in _attributes(value)]
        return (", ".join(wanted), f"no {', '.join(absent)}") if absent else None
    want = f"parameters ({place.parameters.replace(' ', ', ')})"
    if value is None:
        return want, "nothing of that name"
    names = list(inspect.signature(value).parameters)  # type: ignore[arg-type]
    return None if _fits(names, place.parameters.split()) else (want, f"({', '.join(names)})")


def _fits(names: list[str], wanted: list[str]) -> bool:
    """Whether parameters are those wanted, in order."""
    rest = list(names)
    for want in wanted:
        if want == "*":
            return True
        if rest and rest[0] == want.strip("[]"):
            del rest[0]
        elif not want.startswith("["):
            return False
    return not rest


def _attributes(cls: object) -> set[str]:
    """Names of a class: fields, members, and what its constructors mention."""
    names = set(dir(cls))
    for base in getattr(cls, "__mro__", ()):
        names |= set(vars(base).get("__annotations__", ()))
        code = getattr(vars(base).get("__init__"), "__code__", None)
        names |= set(getattr(code, "co_names", ()))
    return names
