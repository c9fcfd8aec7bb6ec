"""Arguments of public ops that no op takes: each is refused by its name.

Tensors of another kind, dtype or device, options of another type, main_grads that cannot be added
to.  What an op expects of shapes and values is in the tests of its system.
"""

from __future__ import annotations

import inspect
import itertools
import warnings

import pytest
import torch

from cute_kernels import errors
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    DtypeError,
    ShapeError,
)
from tests.option_table import calls
from tests.runtime.cached_calls import drawn

FP32 = torch.float32


def t(*shape: int) -> torch.Tensor:
    return drawn(*shape, seed=sum(shape), dtype=FP32)


IDS, ROWS = torch.tensor([[1, 2, 0]]), t(1, 3, 16)
HEAD = {"weight": t(8, 16), "target": IDS}
SITE = {"phi": t(24, 24), "alpha": t(3), "beta": t(24)}
END = {"x": t(5, 6, 4), "f": t(5, 6), "bias": t(6), "H_post": t(5, 4), "H_res": t(5, 4, 4)}
TABLES = {"cos": t(1, 3, 8), "sin": t(1, 3, 8)}
RULE = {
    "q": t(1, 3, 1, 8), "k": t(1, 3, 1, 8), "v": t(1, 3, 2, 8), "beta": t(1, 3, 2),
    "initial_state": t(1, 2, 8, 8),
}  # fmt: skip
#: Op -> right arguments by name, every tensor that it takes among them.
RIGHT = {
    "linear": {"x": ROWS, "weight": t(8, 16), "bias": t(8)},
    "matmul": {"a": t(6, 16), "b": t(16, 8)},
    "skinny_linear": {"x": ROWS, "weight": t(8, 16), "bias": t(8)},
    "grouped_linear": {
        "x": t(6, 16), "weight": t(2, 8, 16), "bias": t(2, 8),
        "expert_offsets": torch.tensor([0, 2, 6], dtype=torch.int32),
    },
    "linear_logp": {"hidden": ROWS, **HEAD, "bias": t(8), "temperature": t(1, 3).abs() + 1},
    "linear_policy_loss": {
        "hidden": ROWS, **HEAD, "bias": t(8), "loss": "grpo", "advantages": t(1, 3),
        "old_logp": t(1, 3), "reference_logp": t(1, 3), "kl_weight": 0.1,
    },
    "causal_conv1d_fn": {
        "x": t(2, 16, 5), "weight": t(16, 4), "bias": t(16), "initial_states": t(2, 16, 3),
    },
    "chunk_gated_delta_rule": {**RULE, "g": -t(1, 3, 2).abs()},
    "fused_recurrent_gated_delta_rule": {
        **RULE, "g": t(1, 3, 2), "A_log": t(2), "dt_bias": t(2) + 1,
        "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True,
    },
    "chunk_kda": {**RULE, "g": -t(1, 3, 2, 8).abs()},
    "fused_recurrent_kda": {
        **RULE, "g": t(1, 3, 2, 8), "A_log": t(2), "dt_bias": t(16) + 1,
        "use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "lower_bound": -5.0,
    },
    "mamba_chunk_scan_combined": {
        "x": t(1, 3, 2, 8), "dt": t(1, 3, 2), "A": t(2), "B": t(1, 3, 1, 16), "C": t(1, 3, 1, 16),
        "D": t(2, 8), "z": t(1, 3, 2, 8), "dt_bias": t(2) + 1, "initial_states": t(1, 2, 8, 16),
    },
    "selective_scan": {
        "u": t(1, 4, 3), "delta": t(1, 4, 3), "A": t(4, 8), "B": t(1, 8, 3), "C": t(1, 8, 3),
        "D": t(4), "z": t(1, 4, 3), "delta_bias": t(4) + 1, "initial_state": t(1, 4, 8),
    },
    "gated_rms_norm": {
        "x": ROWS, "weight": t(16), "gate": ROWS + 1, "eps": 1e-6, "norm_before_gate": True,
    },
    "log_probs": {"logits": t(1, 3, 8), "target": IDS, "temperature": t(1, 3).abs() + 1},
    "rms_norm": {"x": ROWS, "weight": t(16), "residual": ROWS + 1},
    "layer_norm": {"x": ROWS, "weight": t(16), "bias": t(16) + 1, "residual": ROWS + 1},
    "embedding": {"ids": IDS, "weight": t(8, 16)},
    **{op: {"x": ROWS} for op in ("softmax", "log_softmax", "silu", "gelu", "sigmoid", "tanh")},
    **{op: {"gate": ROWS, "up": ROWS + 1} for op in ("silu_mul", "gelu_mul")},
    "rotary_table": {"positions": IDS, "inv_freq": t(4)},
    "apply_rotary": {"q": t(1, 2, 3, 8), "k": t(1, 1, 3, 8), **TABLES},
    "apply_rotary_pos_emb": {"q": t(1, 2, 3, 8), "k": t(1, 1, 3, 8), **TABLES},
    "moe.route": {"logits": t(6, 8), "k": 2, "bias": t(8)},
    "moe.permute": {"x": t(3, 16), "indices": IDS.mT.int(), "experts": 4},
    "moe.load_balance_loss": {"scores": t(3, 8), "indices": IDS.mT.int()},
    "moe.z_loss": {"logits": t(6, 8)},
    "mhc.projection": {"x": END["x"], "phi": SITE["phi"], "norm_weight": t(24)},
    "mhc.scale": {"H": t(5, 32), **SITE, "ms": t(5).abs(), "n": 4},
    "mhc.sinkhorn": {"H_res": END["H_res"], "n": 4},
    "mhc.aggregate": {"x": END["x"], "H_pre": t(5, 4), "n": 4},
    "mhc.expand_combine": {**END, "n": 4},
    "mhc.mix_and_aggregate": {"x": END["x"], **SITE, "norm_weight": t(24)},
    "mhc.post_pre": {**END, **SITE, "norm_weight": t(24), "H_pre": t(5, 4)},
    "mhc.connect": {"x": END["x"], "sublayer": torch.tanh, **SITE, "bias": t(6)},
    "mhc.head": {"x": END["x"], "phi": t(4, 24), "alpha": t(1), "beta": t(4)},
    "mhc.expand_from_embedding": {"embedding": t(5, 6), "n": 4},
}  # fmt: skip
RIGHT["mhc.scale"].pop("phi")


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "is in prototype stage"
        return torch.nested.nested_tensor([tensor, tensor])


#: What is in place of a tensor -> (the wrong argument, the error, a word of its message).
WRONG = {
    "a list": (lambda right: [1.0], ArgumentTypeError, "list"),
    "a module": (lambda right: torch.nn.Identity(), ArgumentTypeError, "Identity"),
    "sparse": (lambda right: right.to_sparse(), ArgumentTypeError, "dense"),
    "nested": (nested, ArgumentTypeError, "nested"),
    "fp64": (lambda right: right.double(), DtypeError, "float64"),
    "fp8": (lambda right: right.to(torch.float8_e4m3fn), DtypeError, "float8"),
    "elsewhere": (lambda right: right.to("meta"), DeviceError, "meta"),
}


def call(op: str, **changed: object):
    return calls.function_of(op)(**RIGHT[op] | changed)


def refused(op: str, error: type, name: str, word: str, **changed: object) -> None:
    """That a call is refused with the error, and a message of the name and the word."""
    with pytest.raises(error) as caught:
        call(op, **changed)
    message = str(caught.value)
    assert type(caught.value) is error and issubclass(error, errors.CuteKernelsError)
    assert issubclass(error, ValueError | TypeError | RuntimeError)
    assert message.startswith(f"{name}: expected") and word in message, message


def tensors(op: str) -> list[str]:
    return [name for name, value in RIGHT[op].items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("op", RIGHT)
def test_right_arguments_are_right(op):
    assert call(op) is not None


@pytest.mark.parametrize("op", RIGHT)
def test_a_wrong_tensor(op):
    """Each in turn.  Of two devices the other argument is named where the first is elsewhere."""
    for name, (make, error, word) in itertools.product(tensors(op), WRONG.values()):
        if error is not DeviceError or name != tensors(op)[0]:
            refused(op, error, name, word, **{name: make(RIGHT[op][name])})


#: Type of an option's annotation -> a value of another type.
OTHER_TYPE = {"bool": 1, "int": 1.5, "float": "1", "str": None}


def options(op: str):
    for name, parameter in inspect.signature(calls.function_of(op)).parameters.items():
        if str(parameter.annotation) in OTHER_TYPE:
            yield name, OTHER_TYPE[str(parameter.annotation)]


@pytest.mark.parametrize("op", RIGHT)
def test_an_option_of_another_type(op):
    for name, value in options(op):
        error = ArgumentValueError if value is None else ArgumentTypeError
        refused(op, error, name, type(value).__name__ if value else "None", **{name: value})


#: What is wrong with a main_grad -> (it, made of a right one and of the weight, error, a word).
MAINS = {
    "a list": (lambda main, w: [0.0], ArgumentTypeError, "list"),
    "nested": (lambda main, w: nested(main), ArgumentTypeError, "nested"),
    "bf16": (lambda main, w: main.bfloat16(), DtypeError, "float32"),
    "another shape": (lambda main, w: main[None], ShapeError, "shape "),
    "a leaf": (lambda main, w: main.requires_grad_(), ArgumentValueError, "requires_grad=False"),
    "elsewhere": (lambda main, w: main.to("meta"), DeviceError, "meta"),
    "negated": (lambda main, w: torch._neg_view(main), ArgumentValueError, "negated"),
    "expanded": (lambda main, w: main.view(-1)[:1].expand(main.shape), AliasError, "distinct"),
    "the weight": (lambda main, w: w, AliasError, "alias of"),
}
#: Op -> (its option, the weights that it is of).
OF_WEIGHTS = {
    **{op: ("main_grad", ["weight"]) for op in (
        "linear", "grouped_linear", "linear_logp", "rms_norm", "layer_norm", "embedding",
        "causal_conv1d_fn", "gated_rms_norm",
    )},
    "mhc.projection": ("main_grads", ["phi", "norm_weight"]),
    "mhc.scale": ("main_grads", ["alpha", "beta"]),
    "mhc.expand_combine": ("main_grads", ["bias"]),
    "mhc.mix_and_aggregate": ("main_grads", ["phi", "norm_weight", "alpha", "beta"]),
    "mhc.post_pre": ("main_grads", ["phi", "norm_weight", "alpha", "beta", "bias"]),
    "mhc.connect": ("main_grads", ["phi", "alpha", "beta", "bias"]),
    "mhc.head": ("main_grads", ["phi", "alpha", "beta"]),
}  # fmt: skip


@pytest.mark.parametrize("op", OF_WEIGHTS)
def test_a_wrong_main_grad(op):
    option, weights = OF_WEIGHTS[op]
    for weight, (wrong, (make, error, word)) in itertools.product(weights, MAINS.items()):
        if wrong == "expanded" and RIGHT[op][weight].numel() == 1:
            continue  # one element is at one address
        main = make(torch.zeros(RIGHT[op][weight].shape), RIGHT[op][weight])
        name = option if option == "main_grad" else f"main_grads[{weight!r}]"
        refused(
            op, error, name, word, **{option: main if option == "main_grad" else {weight: main}}
        )
