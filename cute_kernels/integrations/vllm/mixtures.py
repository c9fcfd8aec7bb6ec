"""vLLM's mixtures of experts on `ck.moe` and `ck.grouped_linear`.

Gate             the router's product
Runner, Router   the choice of experts and their weights, in the place of vLLM's routers
Experts          the experts' weights as loaded, and their products
SharedExpert     the expert that all tokens have, times the sigmoid of its gate
"""

from __future__ import annotations

import sys

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from ...errors import PatchError, expected
from .. import contract_exchange as exchange
from .. import engine_layers
from ..engine_layers import require
from . import refusals, releases
from .layers import OrderedLayer

#: Option of vLLM's experts -> the value with which routing and experts are those of the trainer.
_PLAIN = {
    "activation": MoEActivation.SILU,
    "apply_router_weight_on_input": False,
    "custom_routing_function": None,
    "e_score_correction_bias": None,
    "quant_config": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "swiglu_alpha": None,
    "swiglu_beta": None,
    "swiglu_limit": None,
    "use_grouped_topk": False,
}
#: What compiles vLLM's kernels for gates, which ours do not call (from 0.26 on).
_WARMUP = "vllm.model_executor.warmup.kernel_warmup", "_warmup_ll_bf16_router_gemm"
#: vLLM's routers that choose by softmax: on a GPU, and of 0.32.0 on a CPU.
_ROUTERS = ("FusedTopKRouter", "CPURouter")


class Gate(OrderedLayer, GateLinear):
    """GateLinear on `ck.linear`, with logits in the dtype of the model."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        require("gate", "out_dtype", self.out_dtype)
        warmup = sys.modules.get(_WARMUP[0])
        if hasattr(warmup, _WARMUP[1]):
            setattr(warmup, _WARMUP[1], lambda model: None)

    def forward(self, x: torch.Tensor):
        """Multiply: one kernel for every number of tokens."""
        y = self.quant_method.apply(self, x, self.bias)
        return (y, None) if getattr(self, "return_bias", True) else y


class Router(BaseRouter):
    """Choice of experts by the formula of a patched model."""

    def __init__(self, theirs: BaseRouter, rule: engine_layers.Rule) -> None:
        super().__init__(theirs.top_k, theirs.global_num_experts, theirs.eplb_state)
        self.rule, self._type = rule, theirs.routing_method_type

    @property
    def routing_method_type(self):
        """The kind that vLLM gave its own router."""
        return self._type

    def _compute_routing(self, hidden_states, router_logits, indices_type, **_):
        """Return the weights and indices [T, k]."""
        return engine_layers.route(router_logits, self.top_k, self.rule)


class ExpertsMethod(FusedMoEMethodBase):
    """Products of the experts from weights [E, 2 N, K] and [E, K, N] as they were loaded."""

    create_weights = UnquantizedFusedMoEMethod.create_weights

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights as they are: vLLM's kernels have layouts of their own."""

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig:
        """Return the configuration of weights that are not quantized."""
        return FusedMoEQuantConfig.make()

    def maybe_make_prepare_finalize(self, routing_tables=None) -> None:
        """Keep this method: releases such as 0.25.1 would wrap it in a kernel of vLLM's."""

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        """Run the routed experts; the runner runs the shared one."""
        return engine_layers.experts(x, layer.w13_weight, layer.w2_weight, topk_weights, topk_ids)


class Experts(RoutedExperts):
    """RoutedExperts on `ck.grouped_linear`."""

    cute_kernels_part = exchange.experts_part(), exchange.activation_part("silu")

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for name, want in _PLAIN.items():
            require("experts", name, getattr(self, name, want), want)
        require("experts", "has_bias", self.moe_config.has_bias, False)
        for size in ("tp_size", "ep_size", "dp_size", "pcp_size"):
            require("experts", size, getattr(self.moe_config, size), 1)

    def _get_quant_method(self, prefix, quant_config, moe_config) -> ExpertsMethod:
        require("experts", "quant_config", quant_config)
        return ExpertsMethod(moe_config)


class SharedExpert(torch.nn.Module):
    """Expert of all tokens: sigmoid(gate x) mlp(x), each step rounded as in the trainer."""

    cute_kernels_part = exchange.activation_part("sigmoid")

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's rows times their gates."""
        rows, _ = self.mlp.gate_up_proj(x)
        rows, _ = self.mlp.down_proj(self.mlp.act_fn(rows))
        gate, _ = self.mlp.expert_gate(x)
        return engine_layers.gated(rows, gate)


class Runner(MoERunner):
    """MoERunner with our router and shared expert."""

    def __init__(self, *args, router, routed_experts, shared_experts=None, **kwargs) -> None:
        if type(router).__name__ not in _ROUTERS:
            raise PatchError(expected("router", " or ".join(_ROUTERS), type(router).__name__))
        model_config = get_current_vllm_config().model_config
        rule = refusals.router_rule(model_config, routed_experts.renormalize)
        if shared_experts is not None:
            if getattr(shared_experts, "expert_gate", None) is None:
                want = "one with a gate, as of Qwen 2 MoE"
                raise PatchError(expected("shared_experts", want, type(shared_experts).__name__))
            shared_experts = SharedExpert(shared_experts)
        super().__init__(
            *args,
            router=Router(router, rule),
            routed_experts=routed_experts,
            shared_experts=shared_experts,
            **kwargs,
        )
        require("experts", "routed_scaling_factor", self.routed_scaling_factor, 1.0)
        for name in ("routed_input_transform", "routed_output_transform", "shared_expert_gate"):
            require("experts", name, getattr(self, name))

    @property
    def cute_kernels_part(self) -> exchange.ContractPart:
        return exchange.router_part(self.router.rule)


def register() -> None:
    """Put these classes in the place of vLLM's."""
    releases.register_layers({GateLinear: Gate, RoutedExperts: Experts, MoERunner: Runner})
