"""vLLM with the bits of a patched model: an entry point of ``vllm.general_plugins``.

vLLM calls `plugin.register` in each of its processes.  It does nothing, and imports neither torch
nor vLLM, unless the plug-in is asked for: by CUTE_KERNELS_VLLM=1, or by the engine's argument
``additional_config={"cute_kernels": True}``.  docs/vllm.md says what holds then.

    plugin          the entry point
    arguments       what asks for the plug-in, and the defaults that it fills in
    options         options of ``additional_config``
    ranks           tensor-parallel ranks
    activation      registration of all parts, once a process
    interface       places of vLLM that the plug-in replaces or calls, compared at start
    releases        the vLLM releases that were run, and how their interfaces differ
    refusals        configurations that are refused, by name
    model_check     the walk over a built model: every part that sums has to be one of ours
    loading         tensors that are dropped, and parameters that none fills
    layers, head    linears, embedding, LM head and logits
    mixtures        routers and experts
    families        the mixtures of experts that were compared with the trainer
    pointwise       norms and gated activations (gated: their kernel)
    rotary          rotary embeddings
    attention       the attention backend over pages
    log_probs       log-probs of chosen tokens from fp32 logits
    sampler_v1, sampler_v2    where the samplers of both model runners take them from
"""
