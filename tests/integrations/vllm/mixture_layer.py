"""A mixture's layers of vLLM by themselves: their bytes on a CPU, and the options they refuse.

    python -m tests.integrations.vllm.mixture_layer

Takes either release, also one whose kernels are a GPU's: none of them is called.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace

import torch
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

import cute_kernels as ck
from cute_kernels.errors import PatchError
from cute_kernels.integrations import engine_layers
from cute_kernels.integrations.vllm import layers, mixtures
from tests.contract import same_bytes
from tests.integrations.vllm import processes

EXPERTS, K, WIDTH, INNER = 8, 3, 64, 48
#: Options of vLLM's layer that no family of `families` has, by the name that refuses them.
REFUSED = {
    "scoring_func": {"scoring_func": "sigmoid"},
    "activation": {"activation": "gelu"},
    "use_grouped_topk": {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    "has_bias": {"has_bias": True},
    "routed_scaling_factor": {"routed_scaling_factor": 2.5},
    "apply_router_weight_on_input": {"apply_router_weight_on_input": True},
    "shared_experts": {"shared_experts": torch.nn.Linear(WIDTH, WIDTH)},
}


def layer(number: int, **options) -> torch.nn.Module:
    """vLLM's mixture of experts; its name differs between the releases."""
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER}
    prefix = f"model.layers.{number}.mlp.experts"
    return make(num_experts=EXPERTS, top_k=K, prefix=prefix, **sizes, **options)


def computes_the_trainers_formula(config: VllmConfig) -> None:
    """Gate, router, experts and shared expert, whose gate is in the runner or outside."""
    gate, shared_gate = GateLinear(WIDTH, EXPERTS), ReplicatedLinear(WIDTH, 1, bias=False)
    shared = Qwen2MoeMLP(WIDTH, 40, "silu", reduce_results=False, expert_gate=shared_gate)
    x = torch.randn(7, WIDTH)
    for number, holder in enumerate((None, gate)):
        options = {"renormalize": bool(number), "shared_experts": shared, "gate": holder}
        runner = layer(number, **options)
        for parameter in [*runner.parameters(), *gate.parameters(), *shared.parameters()]:
            parameter.data.normal_(0, 0.2)
        captured = []
        runner.router.set_capture_fn(captured.append)
        if hasattr(runner, "maybe_init_modular_kernel"):
            runner.maybe_init_modular_kernel()
        experts = runner.routed_experts
        experts.quant_method.process_weights_after_loading(experts)
        rule = engine_layers.Rule(normalize=bool(number), rounded=True)
        with set_forward_context(None, config), torch.inference_mode():
            logits, _ = gate(x)
            y = runner(x, logits if holder is None else x)
            weights, indices = engine_layers.route(ck.linear(x, gate.weight), K, rule)
            w13, w2 = experts.w13_weight, experts.w2_weight
            want = engine_layers.experts(x, w13, w2, weights, indices)
            half, up = ck.linear(x, shared.gate_up_proj.weight).chunk(2, -1)
            rows = ck.linear(ck.silu(half) * up, shared.down_proj.weight)
            want = want + ck.sigmoid(ck.linear(x, shared_gate.weight)) * rows
        assert same_bytes(y, want)
        assert len(captured) == 1 and same_bytes(captured[0], indices)


def refuses_other_options() -> None:
    """Every option in one line that names it."""
    for number, (name, options) in enumerate(REFUSED.items()):
        try:
            layer(10 + number, **options)
        except PatchError as error:
            assert name in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"{name} is taken")


def main() -> None:
    """Build the layers in a process of one rank."""
    for part in (layers, mixtures):
        part.register()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1)
        torch.set_default_dtype(torch.bfloat16)
        # A whole ModelConfig needs a checkpoint.
        names = {"architectures": ["Qwen2MoeForCausalLM"], "dtype": torch.bfloat16}
        vars(config)["model_config"] = SimpleNamespace(**names)
        computes_the_trainers_formula(config)
        refuses_other_options()


if __name__ == "__main__":
    main()
    processes.end()
