"""An engine's mixture of experts beside the block of a patched transformers model: equal bytes.

Routers have exact ties: rows of their weight come twice.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.integrations import engine_layers
from tests.anchors import planted
from tests.contract import same_bytes
from tests.integrations import moe_models

pytest.importorskip("transformers")
BF16, FP32 = torch.bfloat16, torch.float32
TOKENS, WIDTH = 70, moe_models.WIDTH
#: (model, norm_topk_prob; None: the config has none).
FAMILIES = [
    ("mixtral", None),
    ("olmoe", False),
    ("qwen2_moe", False),
    ("qwen2_moe", True),
    ("qwen3_moe", True),
]


@functools.cache
def patched_block(kind: str, norm: bool | None) -> torch.nn.Module:
    options = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
    options |= {} if norm is None else {"norm_topk_prob": norm}
    model = moe_models.model_of(kind, num_hidden_layers=1, **options)
    ck.patch(model, strict=True)
    return model.model.layers[0].mlp


@functools.cache
def block_of(kind: str, norm: bool | None, dtype: torch.dtype) -> torch.nn.Module:
    """Block of a patched model in a dtype, with a router of which two rows come twice."""
    block = copy.deepcopy(patched_block(kind, norm)).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        gate = block.gate.weight
        gate[1], gate[4] = gate[0], gate[3]
    return block


def engine(block: torch.nn.Module, x: torch.Tensor, norm: bool | None) -> torch.Tensor:
    """The block as an engine computes it, from weights of an engine's layout."""
    rule = engine_layers.rule_of(type(block.gate).__name__, norm)
    logits = ck.linear(x, block.gate.weight)
    weights, indices = engine_layers.route(logits, block.gate.top_k, rule)
    w13, w2 = block.experts.gate_up_proj, block.experts.down_proj
    y = engine_layers.experts(x, w13, w2, weights, indices)
    if not hasattr(block, "shared_expert"):
        return y
    gate = ck.linear(x, block.shared_expert_gate.weight)
    return engine_layers.gated(block.shared_expert(x), gate) + y


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)


def compare(kind: str, norm: bool | None, dtype: torch.dtype) -> None:
    """The engine's rows are the trainer's, in one batch and one by one."""
    block, x = block_of(kind, norm, dtype), rows(dtype)
    with torch.no_grad():
        trainer = block(x[None])[0]
        assert same_bytes(engine(block, x, norm), trainer)
        for token in (0, 7, TOKENS - 1):
            alone = engine(block, x[token : token + 1], norm)
            assert same_bytes(alone, trainer[token : token + 1])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("kind", "norm"), FAMILIES)
def test_rows_are_the_trainers(kind, norm, dtype):
    compare(kind, norm, dtype)


def test_routers_of_other_families_have_no_rule():
    assert engine_layers.rule_of("DeepseekV3TopkRouter", True) is None
    assert engine_layers.rule_of("GptOssTopKRouter", True) is None
    assert engine_layers.rule_of("MixtralTopKRouter", False).normalize


def test_no_tokens():
    block = block_of("mixtral", None, torch.bfloat16)
    with torch.no_grad():
        assert engine(block, rows(torch.bfloat16)[:0], None).shape == (0, WIDTH)


def on_gpu_layer() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A block of a patched Qwen 3 MoE on the GPU, and rows of two steps."""
    block = copy.deepcopy(block_of("qwen3_moe", True, torch.bfloat16)).to("cuda")
    x = rows(torch.bfloat16).to("cuda")
    return block, x[:64].clone(), x[-64:].clone()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_follows_its_tokens():
    """A captured step has the trainer's bytes for the tokens of each replay."""
    block, first, second = on_gpu_layer()
    with torch.no_grad():
        want = [block(x[None])[0] for x in (first, second)]
        x, graph = first.clone(), torch.cuda.CUDAGraph()
        engine(block, x, True)  # compiles
        with torch.cuda.graph(graph):
            out = engine(block, x, True)
        for tokens, value in zip((first, second), want, strict=True):
            x.copy_(tokens)
            graph.replay()
            assert same_bytes(out, value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_no_host_sync():
    block, x, _ = on_gpu_layer()
    with torch.no_grad():
        engine(block, x, True)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            engine(block, x, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")


_ROUTE = "routing_op.slot_weights(scores, indices, rule.normalize, dtype)"
_GATED = 'gated_rows(rows, "silu")'
_DTYPE = "logits.dtype if rule.rounded else torch.float32"
MIXTRAL, OLMOE, QWEN3 = ("mixtral", None), ("olmoe", False), ("qwen3_moe", True)
#: Name -> (text, its replacement, family, dtype).
MUTANTS = {
    "weights_stay_in_fp32": (_DTYPE, "torch.float32", QWEN3, BF16),
    "weights_are_rounded": (_DTYPE, "logits.dtype", MIXTRAL, BF16),
    "weights_rounded_before_their_sum": (
        _ROUTE,
        "(w := routing_op.slot_weights(scores, indices, False, dtype)) / w.sum(1, keepdim=True)",
        QWEN3, BF16),
    "weights_not_normalised": (
        _ROUTE, "routing_op.slot_weights(scores, indices, False, dtype)", MIXTRAL, BF16),
    "sum_in_the_order_of_experts": (
        _ROUTE, "routing_op.weights(scores, indices, rule.normalize, 1.0).to(dtype)", QWEN3, FP32),
    "ties_by_the_highest": (
        "routing_op.select(scores, None, k, 1, 1)",
        "scores.shape[1] - 1 - routing_op.select(scores.flip(1), None, k, 1, 1)", OLMOE, BF16),
    "combine_in_the_order_of_slots": (
        "moe.combine(rows, weights, permutation)",
        "sum(rows[p.long()].float() * w[:, None].float() for p, w in "
        "zip(permutation.positions.T, weights.T, strict=True)).to(x.dtype)", QWEN3, FP32),
    "gate_not_rounded": (_GATED, "rowwise.silu_mul(*rows.chunk(2, 1))", MIXTRAL, BF16),
    "up_before_gate": (
        _GATED, 'gated_rows(rows.roll(rows.shape[1] // 2, 1), "silu")', MIXTRAL, BF16),
    "sigmoid_not_rounded": (
        "rowwise.sigmoid(gate) * rows",
        "(rowwise.sigmoid(gate.float()) * rows).to(rows.dtype)", ("qwen2_moe", False), BF16),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "family", "dtype"), MUTANTS.values(), ids=MUTANTS)
def test_killed(old, new, family, dtype):
    with planted(engine_layers, (old, new)), pytest.raises(AssertionError):
        compare(*family, dtype)
