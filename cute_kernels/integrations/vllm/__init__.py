"""vLLM with the bits of a patched model: an entry point of ``vllm.general_plugins``.

vLLM calls `plugin.register` in each of its processes.  It does nothing, and imports neither torch
nor vLLM, unless the plug-in is asked for: by CUTE_KERNELS_VLLM=1, or by the engine's argument
``additional_config={"cute_kernels": True}``.  docs/vllm.md says what holds then.

    plugin          the entry point: what asks for the plug-in, and the registration of its parts
    interface       places of vLLM that the plug-in replaces or calls, compared at start
    releases        the vLLM releases that were run, and how their interfaces differ
    refusals        configurations that are refused, by name
    model_check     the walk over a built model: every part that sums has to be one of ours
    loading         tensors that are dropped, and parameters that none fills
    ranks           tensor-parallel ranks, and the order of sums that they share
    layers          linears, embedding, LM head and logits, norms, gated activations
    rotary          rotary embeddings
    mixtures        routers and experts of the mixtures that were compared with the trainer
    recurrent       layers with a state: gated delta nets and scans of Mamba-2
    slots           slots of requests in the records of those layers
    attention       the attention backend over pages
    samplers        log-probs from fp32 logits, in the samplers of both model runners
"""

#: Key of vLLM's ``additional_config``; its value: whether to take part, or options by name.
KEY = "cute_kernels"
