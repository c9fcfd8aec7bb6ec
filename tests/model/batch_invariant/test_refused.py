"""What strict refuses: every overload of the table, on its devices, and nothing without strict."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from cute_kernels.errors import BatchVariantError
from cute_kernels.model.aten import COVERED, REFUSED
from cute_kernels.model.batch_invariant import overrides
from tests.contract import bits
from tests.model.batch_invariant.cases import BF16, drawn, installed

aten = torch.ops.aten

#: (an overload, its row): each is a test.
OVERLOADS = [(op, row) for row in REFUSED for name in row.ops for op in overrides.overloads(name)]
#: For a schema's type, an argument that its parser takes.
PLAIN = {"int": 1, "SymInt": 1, "float": 0.5, "number": 0.5, "bool": True, "str": "sum"}


def argument(kind: str, device: str, dtype: torch.dtype) -> object:
    """Some value of a schema's type: the refusal comes before anybody looks at it."""
    tensor = torch.empty(2, 2, dtype=dtype, device=device).mT
    if kind.startswith("Optional["):
        return argument(kind[9:-1], device, dtype)
    if kind.startswith("List["):
        return [argument(kind[5:-1], device, dtype)]
    if kind == "Generator":
        return None
    return tensor if kind == "Tensor" else PLAIN[kind]


def call(op, device: str, dtype: torch.dtype):
    """The op with tensors on a device that need not be here."""
    with FakeTensorMode():
        arguments = {a.name: argument(str(a.type), device, dtype) for a in op._schema.arguments}
        positional = [arguments[a.name] for a in op._schema.arguments if not a.kwarg_only]
        named = {a.name: arguments[a.name] for a in op._schema.arguments if a.kwarg_only}
        return op(*positional, **named)


def refusal(op, device: str, strict: bool = True) -> str:
    """What the refusal says; nothing if there is none, whatever torch says of such arguments."""
    for dtype in (BF16, torch.float32):  # some are refused in one of them
        with ck.batch_invariant(strict=strict):
            try:
                call(op, device, dtype)
            except BatchVariantError as error:
                return str(error)
            except Exception:
                continue
    return ""


def require_refused(op, row) -> None:
    for device in row.devices:
        text = refusal(op, device)
        assert str(op).removesuffix(".default") in text and device in text
        assert row.why in text and row.instead in text and "strict=True" in text


@pytest.mark.parametrize(
    ("op", "row"), OVERLOADS, ids=lambda v: str(v) if hasattr(v, "_schema") else ""
)
def test_each_is_refused_in_strict_and_not_elsewhere(op, row):
    require_refused(op, row)
    for device in {"cpu", "cuda"} - set(row.devices):
        assert refusal(op, device) == ""
    assert refusal(op, row.devices[0], strict=False) == ""


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.ops[0])
def test_a_hole_in_the_table_is_noticed(row):
    rest = tuple(other for other in REFUSED if other is not row)
    op = overrides.overloads(row.ops[0])[0]
    with installed(COVERED, rest), pytest.raises(AssertionError):
        require_refused(op, row)


#: Op of aten -> what torch's list of ops that throw calls it, where names do not say.
DOCUMENTED = {
    "avg_pool3d_backward": "AvgPool3d",
    "_adaptive_avg_pool2d_backward": "AdaptiveAvgPool2d",
    "_adaptive_avg_pool3d_backward": "AdaptiveAvgPool3d",
    "adaptive_max_pool2d_backward": "AdaptiveMaxPool2d",
    "fractional_max_pool2d_backward": "FractionalMaxPool2d",
    "fractional_max_pool3d_backward": "FractionalMaxPool3d",
    "max_pool3d_with_indices_backward": "MaxPool3d",
    "max_unpool2d": "MaxUnpool1d MaxUnpool2d",
    "max_unpool3d": "MaxUnpool3d",
    "upsample_bilinear2d_backward": "interpolate",
    "nll_loss2d_forward": "NLLLoss",
    "_ctc_loss_backward": "CTCLoss",
    "_embedding_bag_dense_backward": "EmbeddingBag",
    "put": "put_",
    "grid_sampler_2d_backward": "grid_sample",
    "convolution": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
    "index_add": "index_select repeat_interleave",
    "scatter_add": "scatter_add_ gather",
    "index_put": "__getitem__",
}
DOCUMENTED |= {
    f"{kind.lower()}_pad{n}d_backward": f"{kind}Pad{n}d"
    for kind in ("Reflection", "Replication")
    for n in (1, 2, 3)
}
#: Products of sparse tensors are torch's; the others copy, and which of several equal places wins
#: is no rounding.
NOT_REFUSED = {"bmm", "index_copy", "scatter", "median", "resize_"}


def test_what_torch_documents_is_in_the_table():
    text = torch.use_deterministic_algorithms.__doc__
    listed = text[text.index("normally-nondeterministic") : text.index("In addition")]
    documented = re.findall(r"^ +\* :\w+:`torch\.(?:\w+\.)*(\w+)`", listed, re.M)
    known = {name for row in REFUSED for name in row.ops}
    assert len(documented) >= 35 and known >= DOCUMENTED.keys()
    named = {name for names in DOCUMENTED.values() for name in names.split()}
    missing = {*documented} - named - known - NOT_REFUSED
    assert not missing, f"torch documents {missing}: put them into the table"


# ---- rows that name this file as their source ----------------------------------------------------

SEEN = {
    "convolution": lambda x: F.conv2d(x.reshape(-1, 8, 13, 17), drawn(16, 8, 3, 3)),
    "cdist": lambda x: torch.cdist(x, drawn(40, x.shape[1])),
    "native_batch_norm": lambda x: F.batch_norm(torch.cat([x, -x[:1]]), None, None, training=True),
    "bernoulli": lambda x: F.dropout(x, 0.5),
    "softplus": F.softplus,
    "pow.Tensor_Scalar": lambda x: x.abs() ** 0.3,
    "pow.Tensor_Scalar, whole": lambda x: x**5,
    "rsqrt": lambda x: x.abs().bfloat16().rsqrt(),
    "pow.Scalar": lambda x: 1.3**x,
    "exp2": torch.exp2,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "atanh": lambda x: torch.atanh(x / 9),
    "atan2": lambda x: torch.atan2(x, x - 1),
    "logaddexp": lambda x: torch.logaddexp(x, x * 0.7),
    "logaddexp2": lambda x: torch.logaddexp2(x, x * 0.7),
    "igamma": lambda x: torch.igamma(x.abs() + 0.3, x.abs() + 0.2),
    "elu": F.elu,
    "elu, selu": F.selu,
    "elu_backward": lambda x: aten.elu_backward(x * 0.7, 1.0, 1.0, 1.0, False, x),
    "celu": F.celu,
    "mish": F.mish,
    "mish_backward": lambda x: aten.mish_backward(x * 0.7, x),
    "softshrink": F.softshrink,
    "glu": lambda x: F.glu(torch.cat([x, x], -1), -1),
    "huber_loss_backward": lambda x: aten.huber_loss_backward(x * 0.7, x, x * 0.7, 0, 1.0),
    "linalg_matrix_exp": lambda x: torch.matrix_exp(x[:, :9].reshape(-1, 3, 3)),
}


#: Functions of contiguous rows that strict lets by, and of others.
BY_STRIDES = {
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "linalg_vector_norm, normalize": lambda x: F.normalize(x, dim=-1),
    "linalg_vector_norm, Tensor.norm": lambda x: x.norm(dim=-1),
    "prod": lambda x: x.prod(-1),
    "nansum": lambda x: x.nansum(-1),
    "_linalg_slogdet": lambda x: torch.linalg.slogdet(x.unflatten(1, (8, 8)))[1],
}


CUTS = ((0, 1), (0, 2), (1, 4), (3, 8), (5, 22), (57, 60))


@pytest.mark.parametrize("name", list(SEEN))
def test_what_was_seen_on_a_cpu(name):
    """Rows alone and in a batch have other bits; strict refuses the call."""
    x = drawn(60, 8 * 13 * 17 if name == "convolution" else 1071)

    def run(rows: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return SEEN[name](rows)

    named = re.escape(re.split("[.,]", name)[0])
    with ck.batch_invariant(strict=True), pytest.raises(BatchVariantError, match=named):
        run(x)
    whole = run(x)
    parts = [run(x[i:j])[: j - i] for i, j in CUTS]
    again = [whole[i:j] for i, j in CUTS]
    if not any((bits(a) != bits(b)).any() for a, b in zip(parts, again, strict=True)):
        pytest.skip("this CPU's torch keeps the bits of these rows")


@pytest.mark.parametrize("name", list(BY_STRIDES))
def test_rows_that_are_not_contiguous_are_refused_on_a_cpu(name):
    """Rows of a column-major tensor have other bits than contiguous ones; strict refuses them."""
    x, run = drawn(60, 64), BY_STRIDES[name]
    column = x.mT.contiguous().mT
    with ck.batch_invariant(strict=True):
        whole = run(x)
        parts = [run(x[i:j].clone()) for i, j in CUTS]
        with pytest.raises(BatchVariantError, match=re.escape(name.split(",")[0])):
            run(column)
    for (i, j), part in zip(CUTS, parts, strict=True):
        assert (bits(part) == bits(whole[i:j])).all()
    if (bits(run(column)) == bits(whole)).all():
        pytest.skip("this CPU's torch keeps the bits of these rows")


def test_a_power_of_a_number_runs_outside_strict():
    """torch hands the number on as a tensor, to ops that a kernel in Python cannot call."""
    x = drawn(6, 8)
    with ck.batch_invariant():
        assert (bits(torch.pow(2, x)) == bits(2**x)).all() and torch.pow(x.abs(), x).shape == (6, 8)


def test_only_calls_that_round_are_refused():
    x, ids = drawn(4, 6), torch.tensor([0, 2])
    with ck.batch_invariant(strict=True):
        assert torch.bincount(ids).tolist() == [1, 0, 1] and x.norm().dim() == 0
        assert torch.linalg.vector_norm(drawn(6, 4, 8), dim=(1, 2)).shape == (6,)
        for dim in (0, 1, (0, 2)):
            with pytest.raises(BatchVariantError, match="linalg_vector_norm"):
                torch.linalg.vector_norm(drawn(6, 4, 8), dim=dim)
        assert torch.pow(2, torch.arange(5)).tolist() == [1, 2, 4, 8, 16]
        x[ids] = 1.0
        x.index_put_((ids,), drawn(2, 6))
        assert (x**2).shape == (x**-2).shape == (4, 6) and F.elu(x.bfloat16()) is not None
        assert x.rsqrt().dtype == torch.float32
        assert F.batch_norm(x, torch.zeros(6), torch.ones(6)).shape == (4, 6)
        assert F.dropout(x, 0.5, training=False) is not None and F.dropout(x, 0.0) is not None
        assert x.cumsum(-1).shape == (4, 6) and x.std(-1).shape == (4,)  # a CPU's


def test_a_gradient_is_refused_where_its_op_is():
    """Autograd's ops are seen in backward, and not outside."""
    x = drawn(2, 3, 8, 8).requires_grad_()
    y = F.conv2d(x, drawn(4, 3, 3, 3))
    with (
        ck.batch_invariant(strict=True),
        pytest.raises(BatchVariantError, match="convolution_back"),
    ):
        y.sum().backward()


@pytest.mark.parametrize(
    ("label", "make"),
    [
        ("mm", lambda w: w @ w.mT),
        ("sum.dim_IntList", lambda w: w.sum(-1)),
        ("sum.dim_IntList", lambda w: w.float().sum(-1, dtype=torch.float64)),
        ("_softmax", lambda w: F.softmax(w, -1)),
        ("layer_norm", lambda w: F.layer_norm(w, (8,))),
        ("silu", F.silu),
        ("mm.out", lambda w: torch.mm(w, w.mT, out=torch.empty(4, 4, dtype=w.dtype))),
        ("mm", lambda w: torch.mm(w.to(torch.complex64), w.mT.to(torch.complex64))),
        ("bmm", lambda w: torch.einsum("ij,kj->ik", w, w)),
        ("embedding", lambda w: F.embedding(torch.tensor([1]), w.float(), sparse=True)),
        ("embedding", lambda w: F.embedding(torch.tensor([1]), w.float(), scale_grad_by_freq=True)),
        ("layer_norm", lambda w: F.layer_norm(torch.zeros(1, 70000), (70000,))),
        ("multi_dot", lambda w: torch.linalg.multi_dot([w, w.mT, w])),  # a list is looked at
    ],
)
def test_calls_of_covered_ops_that_are_not_covered(label, make):
    wide = drawn(4, 8, dtype=torch.float64)
    with ck.batch_invariant():
        make(wide)
    with ck.batch_invariant(strict=True), pytest.raises(BatchVariantError, match=label):
        make(wide)
