"""Bad inputs, in one table: each names the argument, what was expected and what came."""

from __future__ import annotations

import warnings

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DtypeError,
    ShapeError,
    UnsupportedTransformError,
)

M, N, K = 6, 10, 8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def t(*shape: int, dtype: torch.dtype = BF16, device: str = "cpu") -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.ones(shape, device=device).to(dtype)
    return torch.ones(shape, dtype=dtype, device=device)


def x(**options):
    return t(M, K, **options)


def w(**options):
    return t(N, K, **options)


def grad(**options):
    return t(N, K, **({"dtype": FP32} | options))


def nested(width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Two matrices of other heights in one tensor, which has no sizes of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "is in prototype stage"
        return torch.nested.nested_tensor([t(3, width), t(2, width)], dtype=dtype)


BUFFER = torch.zeros(4 * N * K)


def inside(offset: int) -> torch.Tensor:
    """An [N, K] fp32 view into one buffer."""
    return BUFFER[offset : offset + N * K].view(N, K)


def lin(*args, **options):
    return lambda: ck.linear(*args, **options)


def mm(*args, **options):
    return lambda: ck.matmul(*args, **options)


def few(*args, **options):
    return lambda: ck.skinny_linear(*args, **options)


def into(main_grad, x=None, weight=None, *bias):
    """`linear` of fp32 with a main_grad."""
    x, weight = (t(*s, dtype=FP32) if o is None else o for o, s in ((x, (M, K)), (weight, (N, K))))
    return lin(x, weight, *bias, main_grad=main_grad)


#: (what is wrong, a call, the exception, fragments of its message): a row for each branch.
CASES = [
    # ranks and inner dimensions
    ("K differs", lin(t(M, K + 1), w()), ShapeError, ["x", "8", f"[{M}, {K + 1}]"]),
    ("x is a scalar", lin(t(), w()), ShapeError, ["x", "at least 1 dimension"]),
    ("weight 3-D", lin(x(), t(1, N, K)), ShapeError, ["weight", "2 dimensions", "[1, 10, 8]"]),
    ("matmul inner", mm(x(), t(K + 2, N)), ShapeError, ["b", "8 rows", "[10, 10]"]),
    ("matmul a 1-D", mm(t(K), t(K, N)), ShapeError, ["a", "2 dimensions [M, K]"]),
    ("matmul b 3-D", mm(x(), t(2, K, N)), ShapeError, ["b", "2 dimensions"]),
    # dtypes
    ("bf16 and fp16", lin(x(), w(dtype=FP16)), DtypeError, ["weight", "bfloat16", "float16"]),
    ("matmul dtypes", mm(x(), t(K, N, dtype=FP16)), DtypeError, ["b", "bfloat16", "float16"]),
    # bias
    ("bias [N+1]", lin(x(), w(), t(N + 1)), ShapeError, ["bias", "[10]", "[11]"]),
    ("bias [1, N]", lin(x(), w(), t(1, N)), ShapeError, ["bias", "1 dimension [N]", "[1, 10]"]),
    # order
    ("order tre", lin(x(), w(), order="tre"), ArgumentValueError, ["order", "'chain'", "'tree'"]),
    ("matmul order", mm(x(), t(K, N), order="fast"), ArgumentValueError, ["order", "'fast'"]),
    # main_grad
    ("rows", into(BUFFER.as_strided((N, K), (K - 1, 1))), AliasError, ["main_grad", "(7, 1)"]),
    ("at weight", into(inside(N * K - 1), None, inside(0)), AliasError, ["alias of weight"]),
    ("at x", into(inside(4), inside(0)), AliasError, ["main_grad", "alias of x"]),
    ("at bias", into(inside(0), None, None, BUFFER[:N]), AliasError, ["alias of bias"]),
    # few rows
    ("129 rows", few(t(129, K), w()), ShapeError, ["x", "128", "linear(order='tree')", "129"]),
    ("3 x 64 rows", few(t(3, 64, K), w()), ShapeError, ["x", "at most 128 rows", "192"]),
    ("129 on meta", few(t(129, K, device="meta"), w(device="meta")), ShapeError, ["x", "128"]),
    ("few, K", few(t(M, K + 1), w()), ShapeError, ["x", "last dimension 8"]),
    ("few, weight 1-D", few(x(), t(K)), ShapeError, ["weight", "2 dimensions"]),
    ("bias of all", few(x(), w(), t(N + 1)), ShapeError, ["bias", "[10]", "[11]"]),
    ("bias [M, 1]", few(x(), w(), t(M, 1)), ShapeError, ["bias", "[6, 10]", "[6, 1]"]),
    ("bias 3-D", few(t(2, 3, K), w(), t(2, 3, N)), ShapeError, ["bias", "1 dimension"]),
    ("bias of 7 rows", few(t(2, 3, K), w(), t(7, N)), ShapeError, ["bias", "[6, 10]"]),
    ("bias fp16", few(x(), w(), t(M, N, dtype=FP16)), DtypeError, ["bias", "16"]),
    ("few, mixed", few(x(), w(dtype=FP16)), DtypeError, ["weight", "float16"]),
    (
        "few, 1 for True",
        few(x(), w(), deterministic=1),
        ArgumentTypeError,
        ["deterministic", "int"],
    ),
    # queries
    ("unknown op", lambda: ck.guarantees("lstm"), ArgumentValueError, ["op", "'linear'", "'lstm'"]),
    ("unknown op id", lambda: ck.contract_id("x"), ArgumentValueError, ["op", "'matmul'"]),
    ("id on meta", lambda: ck.contract_id("linear", "meta"), BackendUnavailable, ["linear", "cpu"]),
    (
        "reduction",
        lambda: ck.set_reduction(skinny="slow"),
        ArgumentValueError,
        ["skinny", "'slow'"],
    ),
]


@pytest.mark.parametrize(("label", "call", "error", "fragments"), CASES, ids=lambda v: str(v)[:24])
def test_bad_input(label, call, error, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert isinstance(caught.value, ValueError | TypeError | RuntimeError)
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_devices_without_a_backend_are_refused(device, monkeypatch):
    """No such device is here, so the check sees a meta tensor that says it is one."""
    from cute_kernels.gemm import checks

    problem = checks.Problem(1, 1, 1, BF16, torch.device(device))
    with pytest.raises(BackendUnavailable, match=f"no backend for {device}") as caught:
        checks._common(problem, "chain")
    assert "cute_sm90" in str(caught.value) and "triton" in str(caught.value)


@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_sizes_that_tma_cannot_count_are_refused(name):
    size = {"m": 1, "n": 1, "k": 1}
    for length, refused in ((2**31 - 1, False), (2**31, True)):
        m, n, k = (size | {name: length}).values()
        rows, weight = torch.empty(m, k, device="meta"), torch.empty(n, k, device="meta")
        if refused:
            with pytest.raises(errors.ShapeError, match=f"{name}: expected at most {2**31 - 1}"):
                ck.linear(rows, weight)
        else:
            assert ck.linear(rows, weight).shape == (m, n)


def test_vmap_over_weights_is_refused_and_over_rows_works():
    weights, rows = torch.randn(3, N, K), torch.randn(3, 4, K)
    with pytest.raises(UnsupportedTransformError, match="x"):
        torch.func.vmap(lambda one: ck.linear(rows[0], one))(weights)
    with pytest.raises(UnsupportedTransformError, match="skinny_linear"):
        torch.func.vmap(lambda x: ck.skinny_linear(x, weights[0]))(rows)
    got = torch.func.vmap(lambda one: ck.linear(one, weights[0]))(rows)
    want = torch.stack([ck.linear(row, weights[0]) for row in rows])
    assert (got.view(torch.int32) == want.view(torch.int32)).all()


def test_a_backend_that_there_is_not_is_refused(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cublas")
    with pytest.raises(errors.SettingError, match="CUTE_KERNELS_BACKEND"):
        ck.linear(x(), w())


@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_a_setting_that_is_no_number(monkeypatch, value):
    from cute_kernels import settings

    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", value)
    with pytest.raises(errors.SettingError, match="MAX_CTAS"):
        settings.max_ctas()


@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, N, K), (M, 0, K), (M, N, 0), (0, 0, 0), (0, N, 0), (M, 0, 0)]
)
def test_sizes_of_zero_are_no_errors(m, n, k):
    rows = torch.randn(m, k, requires_grad=True)
    weight, bias = torch.randn(n, k, requires_grad=True), torch.randn(n, requires_grad=True)
    y = ck.linear(rows, weight, bias)
    assert y.shape == (m, n)
    if k == 0:
        assert (y == bias).all()
    y.sum().backward()
    assert rows.grad.shape == (m, k) and weight.grad.shape == (n, k)
    assert bias.grad.tolist() == [float(m)] * n
    main_grad = torch.randn(n, k)
    before = main_grad.clone()
    ck.linear(rows.detach(), weight, main_grad=main_grad).sum().backward()
    assert m == 0 or n * k == 0 or not torch.equal(before, main_grad)
    assert m or torch.equal(before, main_grad)
