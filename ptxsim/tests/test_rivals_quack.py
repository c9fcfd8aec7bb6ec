"""quack's kernels on the simulator, by their own launch paths; skipped without quack-kernels."""

import importlib
import importlib.util
from itertools import pairwise

import pytest

import ptxsim
from ptxsim import skips
from ptxsim.modes import ANY_CTA

from .rivals import MARKS, SCHEDULES, bf16, patched, relative, same_bytes

torch = skips.import_module("torch")

pytestmark = MARKS


@pytest.fixture
def quack():
    """Imports a module of quack, inside `patch`."""
    with patched("quack", "quack-kernels"):
        yield lambda name: importlib.import_module("quack." + name)


@pytest.mark.parametrize(
    "shape, dtype",
    [((17, 768), torch.bfloat16), ((3, 1000), torch.float32), ((2, 40960), torch.float32)],
)
def test_softmax(quack, shape, dtype):
    x = torch.randn(shape).to(dtype)
    found = quack("softmax").softmax_fwd(x)
    exact = torch.softmax(x.double(), dim=-1)
    assert relative(found, exact) < (4e-3 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("shape, dtype", [((17, 768), torch.bfloat16), ((5, 4096), torch.float32)])
def test_rmsnorm(quack, shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1])
    found = quack("rmsnorm").rmsnorm_fwd(x, weight, store_rstd=True)
    rstd = (x.double().square().mean(-1) + 1e-6).rsqrt()
    exact = x.double() * rstd[:, None] * weight.double()
    assert relative(found[0], exact) < (4e-3 if dtype is torch.bfloat16 else 1e-6)
    assert relative(found[2], rstd) < 1e-6


@pytest.mark.parametrize("schedule", ["default", "random"])
@pytest.mark.parametrize(
    "tile, cluster, pingpong",
    [((128, 128), (1, 1), False), ((128, 192), (2, 1), False), ((64, 128), (1, 1), True)],
)
def test_gemm(quack, tile, cluster, pingpong, schedule):
    a, b = bf16(1, 200, 136), bf16(1, 264, 136)
    d = torch.full((1, 200, 264), float("nan"), dtype=torch.bfloat16)
    with ptxsim.options(**SCHEDULES[schedule]):
        quack("gemm").gemm(a, b, d, None, None, *tile, *cluster, pingpong=pingpong)
    exact = torch.einsum("lmk,lnk->lmn", a.double(), b.double())
    assert relative(d, exact) < 3e-3


@pytest.mark.parametrize(
    "options",
    [
        {"persistent": False},
        {"is_dynamic_persistent": True},
        {"pingpong": True, "cluster": (2, 1)},
        {"c": True},
        {"tile": (256, 128), "cluster": (1, 2)},
    ],
    ids=str,
)
def test_gemm_options(quack, options):
    options = {"tile": (128, 128), "cluster": (1, 1), "c": False} | options
    tile, cluster, with_c = (options.pop(name) for name in ("tile", "cluster", "c"))
    a, b = bf16(2, 200, 264), bf16(2, 264, 264)
    c = bf16(2, 200, 264) if with_c else None
    dynamic = options.get("is_dynamic_persistent")
    counter = torch.zeros(1, dtype=torch.int32) if dynamic else None
    d = torch.full((2, 200, 264), float("nan"), dtype=torch.bfloat16)
    with ptxsim.options(**ANY_CTA, seed=11):
        quack("gemm").gemm(a, b, d, c, counter, *tile, *cluster, **options)
    exact = torch.einsum("lmk,lnk->lmn", a.double(), b.double())
    assert relative(d, exact + (c.double() if with_c else 0)) < 3e-3


def test_gemm_of_groups_along_m(quack):
    """Groups of different size: tensor maps are edited on the device."""
    ends = [0, 70, 200, 330]
    a, b = bf16(330, 136), bf16(3, 128, 136)
    d = torch.full((330, 128), float("nan"), dtype=torch.bfloat16)
    offsets = torch.tensor(ends, dtype=torch.int32)
    with ptxsim.options(**ANY_CTA, seed=11):
        quack("gemm").gemm(a, b, d, None, None, 128, 128, 1, 1, cu_seqlens_m=offsets)
    parts = [a[i:j].double() @ b[n].double().T for n, (i, j) in enumerate(pairwise(ends))]
    assert relative(d, torch.cat(parts)) < 3e-3


def test_gemm_of_groups_along_k(quack):
    ends = [0, 64, 200, 328]
    a, b = bf16(328, 128).T, bf16(328, 136).T
    d = torch.full((3, 128, 136), float("nan"), dtype=torch.bfloat16)
    offsets = torch.tensor(ends, dtype=torch.int32)
    with ptxsim.options(**ANY_CTA, seed=11):
        quack("gemm").gemm(a, b, d, None, None, 128, 128, 1, 1, cu_seqlens_k=offsets)
    parts = [a[:, i:j].double() @ b[:, i:j].double().T for i, j in pairwise(ends)]
    assert relative(d, torch.stack(parts)) < 3e-3


@pytest.fixture
def rows():
    return bf16(33, 1024), torch.randn(1024), bf16(33, 1024)


@pytest.fixture
def random_timing():
    with ptxsim.options(**ANY_CTA, seed=11):
        yield


@pytest.mark.usefixtures("random_timing")
def test_norms(quack, rows):
    x, weight, dout = rows
    xd, wd = x.double().requires_grad_(), weight.double().requires_grad_()
    scale = (xd.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = torch.autograd.grad(xd * scale * wd, (xd, wd), dout.double())
    norm = quack("rmsnorm")
    found = norm.rmsnorm_bwd(x, weight, dout, scale.detach()[:, 0].float())
    assert relative(found[0], exact[0]) < 4e-3 and relative(found[1], exact[1]) < 4e-3
    exact = torch.nn.functional.layer_norm(x.double(), (1024,), weight.double(), None, 1e-6)
    assert relative(norm.layernorm_fwd(x, weight, eps=1e-6), exact) < 4e-3


@pytest.mark.usefixtures("random_timing")
def test_softmax_backward(quack, rows):
    x, _, dout = rows
    y = torch.softmax(x.float(), -1).bfloat16()
    dot = (dout.double() * y.double()).sum(-1, keepdim=True)
    exact = y.double() * (dout.double() - dot)
    assert relative(quack("softmax").softmax_bwd(dout, y), exact) < 4e-3


@pytest.mark.usefixtures("random_timing")
def test_cross_entropy_and_topk(quack, rows):
    x, target = rows[0], torch.randint(0, 1024, (33,))
    found = quack("cross_entropy").cross_entropy_fwd(x, target)
    exact = torch.nn.functional.cross_entropy(x.double(), target, reduction="none")
    assert relative(found[0] if isinstance(found, tuple) else found, exact) < 1e-6
    values = quack("topk").topk(x.float(), 16)[0]
    assert same_bytes(values, torch.topk(x.float(), 16, -1)[0])
