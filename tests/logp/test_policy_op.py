"""The op of linear_policy_loss: numbers in graphs, autograd, bad inputs."""

from __future__ import annotations

import functools
import inspect
import math
import re

import pytest
import torch
from torch.autograd import forward_ad

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    ShapeError,
    UnsupportedTransformError,
)
from cute_kernels.logp import policy_checks, policy_sweep
from tests.contract import same_bytes
from tests.logp import policy_cases as cases
from tests.logp.policy_cases import FP32

X = cases.problem("grpo", "some", bias=True)
OPTIONS = cases.options_of("grpo")


def loss_of(leaves, x=X, **options):
    options = {"loss": "grpo", "mask": x.mask} | x.tensors | OPTIONS | options
    return ck.linear_policy_loss(leaves[0], leaves[1], x.target, leaves[2], **options)


# ---- graphs --------------------------------------------------------------------------------------


def test_numbers_that_change_stay_in_the_graph():
    """Dynamo makes symbols of them; KL weights and clips are annealed."""
    torch.compiler.reset()

    def run(hidden, number):
        return ck.linear_policy_loss(
            hidden, X.weight, X.target, mask=X.mask, loss="grpo", kl_weight=number,
            entropy_weight=number, loss_scale=number, clip_high=number, divisor=number,
            temperature=number, softcap=number, **X.tensors,
        ).loss  # fmt: skip

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for number in (0.5, 0.75, 0.25):
        assert same_bytes(compiled(X.hidden, number), run(X.hidden, number))


def test_a_function_in_a_graph_is_refused():
    torch.compiler.reset()

    def run(hidden):
        return ck.linear_policy_loss(hidden, X.weight, X.target, loss=lambda p, h: -p).loss

    with pytest.raises(Exception, match=r"the name of a loss in a graph of torch\.compile"):
        torch.compile(run, fullgraph=True, backend="aot_eager")(X.hidden)


# ---- autograd ------------------------------------------------------------------------------------


def test_tangents_of_the_losss_tensors_are_refused():
    """A loss without their tangents would look like a constant."""
    tensors = {name: torch.nan_to_num(t) for name, t in X.tensors.items()}
    for name, t in tensors.items():
        with forward_ad.dual_level():
            dual = tensors | {name: forward_ad.make_dual(t, torch.ones_like(t))}
            with pytest.raises(UnsupportedTransformError, match="jvp"):
                loss_of(X[:3], **dual)


def test_results_without_gradients_cost_no_gradient_work(monkeypatch):
    want = loss_of(cases.leaves_of(X))
    for owner in (policy_sweep, policy_sweep.chunks):
        monkeypatch.setattr(owner, "_gradients" if owner is policy_sweep else "gradients", None)
    monkeypatch.setattr(policy_sweep.op, "kept_sums", None)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = loss_of(cases.leaves_of(X))
        assert not got.loss.requires_grad
        assert same_bytes(got.loss, want.loss) and same_bytes(got.logp, want.logp)
    assert not want.logp.requires_grad and want.loss.requires_grad


def test_no_tokens():
    x = X._replace(
        hidden=X.hidden[:, :0], target=X.target[:, :0], mask=X.mask[:, :0],
        tensors={k: t[:, :0] for k, t in X.tensors.items()},
    )  # fmt: skip
    got = cases.fused("grpo", x, entropy_weight=0.1, **OPTIONS)
    assert got.loss == 0 and got.logp.shape == (3, 0) == got.entropy.shape
    assert not got.weight.any() and got.hidden.shape == x.hidden.shape


def test_guarantees():
    assert ck.guarantees("linear_policy_loss", "cpu") == {"run_to_run", "batch_invariant"}
    assert ck.contract_id("linear_policy_loss") != ck.contract_id("linear_logp")


# ---- bad inputs ----------------------------------------------------------------------------------

T, L = 2, 5
H, W, TARGET = torch.randn(T, L, 8), torch.randn(12, 8), torch.ones(T, L, dtype=torch.int64)
A = torch.randn(T, L)


def negative(logp, entropy, **tensors):
    return -logp


VALUE, KIND = ArgumentValueError, ArgumentTypeError


def bad(error, words, **options):
    return pytest.param(options, error, words, id=words[:40])


BAD = [
    bad(VALUE, "loss: expected one of", loss="grppo"),
    bad(VALUE, "gspo's ratio is of a whole sequence", loss="gspo"),
    bad(KIND, "loss: expected the name of a loss", loss=3),
    bad(VALUE, "advantages: expected a tensor, as loss='grpo'", advantages=None),
    bad(VALUE, "advantages: expected None, as loss='dft'", loss="dft"),
    bad(VALUE, "old_logp: expected None", loss="policy_gradient", old_logp=A),
    bad(ShapeError, "advantages: expected shape [2, 5]", advantages=torch.randn(L)),
    bad(VALUE, "old_logp: expected requires_grad=False", old_logp=A.clone().requires_grad_()),
    bad(VALUE, "reference_logp: expected log-probs of the reference", kl_weight=0.1),
    bad(VALUE, "kl: expected one of", kl="k4"),
    bad(VALUE, "clip_high: expected a finite number of fp32", clip_high=1e300),
    bad(VALUE, "ignore_index: expected an int of 64", mask=torch.ones(T, L), ignore_index=2**63),
    bad(KIND, "ignore_index: expected an int, got str", mask=torch.ones(T, L), ignore_index="x"),
    bad(VALUE, "kl_weight: expected a finite number", kl_weight=math.nan),
    bad(VALUE, "reduction: expected one of", reduction="mean"),
    bad(VALUE, "max_length: expected the length", loss="dr_grpo"),
    bad(VALUE, "entropy_reduction: expected one of", entropy_reduction="mean"),
    bad(VALUE, "max_length: expected None", max_length=5),
    bad(VALUE, "max_length: expected a number above 0", loss="dr_grpo", max_length=0),
    bad(VALUE, "divisor: expected a number above 0", divisor=0),
    bad(VALUE, "divisor: expected a finite number", divisor=torch.tensor(math.inf)),
    bad(DtypeError, "divisor: expected a tensor of one real", divisor=torch.tensor(True)),
    bad(VALUE, "divisor: expected requires_grad=False", divisor=torch.ones(1).requires_grad_()),
    bad(ShapeError, "divisor: expected a number above 0, or a tensor", divisor=torch.ones(2)),
    bad(VALUE, "clip_low: expected 0 to 1", clip_low=1.5),
    bad(VALUE, "clip_high: expected 0 or more", clip_high=-0.1),
    bad(VALUE, "max_ratio: expected at least 1 + clip_high", max_ratio=1.1),
    bad(VALUE, "gate_positive: expected None, as loss='grpo'", gate_positive=1.0),
    bad(VALUE, "clip_high: expected a number above 0", loss="spo", clip_high=0.0),
    bad(VALUE, "loss_scale: expected a finite number", loss_scale=math.inf),
    bad(ShapeError, "mask: expected shape [2, 5]", mask=torch.ones(5)),
    bad(DtypeError, "mask: expected one of", mask=torch.ones(T, L).double()),
    bad(VALUE, "mask: expected values of 0 and 1 (token_weights=", mask=torch.full((T, L), 0.5)),
    bad(VALUE, "tensors: expected None, as loss='grpo'", tensors={"x": A}),
    bad(VALUE, "tensors: expected names other than", loss=negative, tensors={"logp": A}),
    bad(KIND, "tensors: expected a mapping", loss=negative, tensors=[A]),
    bad(VALUE, "loss: expected a function that returns a tensor", loss=lambda p, h, **t: 1.0),
    bad(KIND, "loss: expected a function of (logp, entropy, advantages)", loss=lambda p: -p),
    bad(KIND, "epsilon: expected clip_low= and clip_high= in linear_policy_loss", epsilon=0.2),
    bad(KIND, "clip_lo: expected an argument in linear_policy_loss, got clip_lo=0.2", clip_lo=0.2),
    bad(VALUE, "a loss per token, got torch.float32 []", loss=lambda p, h, **t: p.mean()),
    bad(ShapeError, "target: expected 1 dimension [T], as cu_s", cu_seqlens=torch.tensor([0, 10])),
    bad(DtypeError, "cu_seqlens: expected int64", cu_seqlens=torch.tensor([0.0, 10.0])),
    bad(ShapeError, "cu_seqlens: expected shape [B + 1]", cu_seqlens=torch.tensor([0])),
    bad(VALUE, "target: expected entries of 0 to 11", target=torch.full((T, L), 12)),
    bad(DtypeError, "target: expected int64", target=A, mask=torch.ones(T, L)),
    bad(VALUE, "temperature: expected a number", temperature=0.0),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "words"), BAD)
def test_bad_inputs(options, error, words):
    given = {"advantages": A, "target": TARGET} | options
    with pytest.raises(error) as caught:
        ck.linear_policy_loss(H, W, given.pop("target"), **given)
    assert words in str(caught.value)


def test_the_names_of_other_libraries_are_none_of_ours():
    ours = inspect.signature(ck.linear_policy_loss).parameters
    for theirs, instead in policy_checks.OTHER_NAMES.items():
        assert theirs not in ours and set(re.findall(r"(\w+)=", instead)) <= set(ours), theirs


def test_a_divisor_of_no_tokens():
    """``divisor=mask.sum()`` of a batch without tokens: a loss of 0, as on a GPU."""
    mask, leaves = torch.zeros(T, L), [H.clone().requires_grad_(), W.clone().requires_grad_()]
    for dtype in (torch.int64, FP32):
        out = ck.linear_policy_loss(
            *leaves, TARGET, advantages=A, mask=mask, divisor=mask.sum(dtype=dtype),
            entropy_weight=0.1,
        )  # fmt: skip
        out.loss.backward()
        assert out.loss == 0 and not leaves[0].grad.any() and not leaves[1].grad.any()
    for divisor, kept in ((-1.0, mask), (0.0, mask.index_fill(1, torch.tensor([2]), 1.0))):
        with pytest.raises(ArgumentValueError, match=r"^divisor: expected a number above 0"):
            ck.linear_policy_loss(
                *leaves, TARGET, advantages=A, mask=kept, divisor=torch.tensor(divisor)
            )


def test_a_value_a_sequence_is_not_one_a_token():
    """As many packed tokens as sequences: [B] could be either."""
    hidden, target, given = H[0, :3], TARGET[0, :3], torch.tensor([5.0, 1.0, -2.0])
    options = {"loss": "policy_gradient", "reduction": "sum"}
    call = functools.partial(ck.linear_policy_loss, hidden, W, target, **options)
    uneven, single = torch.tensor([0, 0, 2, 3]), torch.arange(4, dtype=torch.int32)
    for name in ("advantages", "token_weights"):
        tensors = {"advantages": torch.ones(3, 1)} | {name: given}
        with pytest.raises(ShapeError, match=rf"^{name}: expected \[B, 1\], a value a sequence"):
            call(cu_seqlens=uneven, **tensors)
    got = call(cu_seqlens=uneven, advantages=given[:, None])
    assert same_bytes(got.loss, call(advantages=torch.tensor([1.0, 1.0, -2.0])).loss)
    want = call(advantages=given).loss
    assert same_bytes(call(cu_seqlens=single, advantages=given).loss, want)
    assert same_bytes(call(cu_seqlens=single, advantages=given[:, None]).loss, want)


def test_an_int32_target_and_an_ignore_index_beyond_it():
    target, mask = TARGET.int(), A > 0
    made = [
        ck.linear_policy_loss(H, W, t, loss="cross_entropy", mask=mask, ignore_index=2**40).loss
        for t in (target, TARGET)
    ]
    assert same_bytes(*made) and made[0] != 0


def test_a_function_of_parameters_is_refused():
    """They would get no gradient."""
    scale = torch.randn(3, requires_grad=True)
    functions_of = {
        "leaf": lambda logp, entropy: -logp * scale[0],
        "another graph": lambda logp, entropy: -logp * scale.sum(),
        "no log p": lambda logp, entropy: scale[0].expand(len(logp)),
    }
    hidden = H.clone().requires_grad_()
    for name, function in functions_of.items():
        with pytest.raises(ArgumentValueError, match=r"^loss: expected a function of tensors wit"):
            ck.linear_policy_loss(hidden, W, TARGET, loss=function)
        with torch.no_grad():
            assert ck.linear_policy_loss(hidden, W, TARGET, loss=function).loss.isfinite(), name
    detached = scale.detach()
    ck.linear_policy_loss(hidden, W, TARGET, loss=lambda p, h: -p * detached[0]).loss.backward()
    assert hidden.grad.any()


def test_a_function_that_writes_into_what_it_gets():
    def writes(logp, entropy, *, old_logp, reference_logp):
        reference_logp.zero_()
        return old_logp.sub_(logp).exp_() * (logp if logp.requires_grad else logp.mul_(1.0))

    def plain(logp, entropy, *, old_logp, reference_logp):
        return (old_logp - logp).exp() * logp

    for hidden in (H, H.clone().requires_grad_()):
        x = {"old_logp": A, "reference_logp": -A, "kl": "k3_importance", "kl_weight": 0.1}
        made = [ck.linear_policy_loss(hidden, W, TARGET, loss=f, **x) for f in (writes, plain)]
        a, b = ((out.loss, out.logp, out.metrics.ratio) for out in made)
        assert all(same_bytes(x, y) for x, y in zip(a, b, strict=True))


def test_packed_tokens_without_edges_have_no_sequences():
    with pytest.raises(ShapeError, match=r"target: expected target \[\.\.\., L\]|cu_seqlens"):
        ck.linear_policy_loss(H[0], W, TARGET[0], advantages=A[0])
    with pytest.raises(ArgumentValueError, match="cu_seqlens: expected ascending positions"):
        ck.linear_policy_loss(
            H[0], W, TARGET[0], advantages=A[0], cu_seqlens=torch.tensor([0, 3, 4])
        )
