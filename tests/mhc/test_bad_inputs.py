"""Bad inputs of mhc, in one table: each names the argument, what was expected, what came.

Every row is (what is wrong, a call, the exception, fragments of its message).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

import cute_kernels as ck
from cute_kernels import errors, mhc
from cute_kernels.errors import (
    AliasError,
    ArgumentTypeError,
    ArgumentValueError,
    BackendUnavailable,
    DeviceError,
    DtypeError,
    ShapeError,
)
from cute_kernels.mhc import Options
from tests.mhc import cases

M, C, N4 = 5, 6, 24
K = 4 * C
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KIND, VALUE = ArgumentTypeError, ArgumentValueError
BUFFER = cases.normal(4 * N4 * K, seed=1)


def t(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    return cases.normal(*shape, seed=sum(shape)).to(device, dtype)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "is in prototype stage"
        return torch.nested.nested_tensor([t(3, C, 4), t(2, C, 4)])


def given(**wrong) -> dict:
    """Right tensors of every argument, but for what is wrong."""
    right = {
        "x": t(M, C, 4),
        "phi": t(N4, K),
        "alpha": t(3),
        "beta": t(N4),
        "f": t(M, C),
        "bias": None,
        "H_post": t(M, 4),
        "H_res": t(M, 4, 4),
    }
    return right | wrong


def _call(function, names: tuple[str, ...], **wrong):
    """Arguments that ``names`` has by position, the others by name."""
    right = given()
    others = {k: v for k, v in wrong.items() if k not in names}
    return lambda: function(*(wrong.get(name, right[name]) for name in names), **others)


def proj(**wrong):
    return _call(mhc.projection, ("x", "phi"), **wrong)


def site(**wrong):
    return _call(mhc.mix_and_aggregate, ("x", "phi", "alpha", "beta"), **wrong)


def with_option(**wrong):
    return site(options=replace(Options(), **wrong))


def two(**wrong):
    names = ("f", "bias", "H_post", "x", "H_res", "phi", "alpha", "beta")
    return _call(mhc.post_pre, names, **wrong)


def end(n=4, **wrong):
    names = ("f", "bias", "H_post", "x", "H_res")
    right = given(**{k: v for k, v in wrong.items() if k in names})
    others = {k: v for k, v in wrong.items() if k not in names}
    return lambda: mhc.expand_combine(*(right[name] for name in names), n, **others)


def link(sublayer=torch.tanh, **wrong):
    right = given(**wrong)
    rest = {k: v for k, v in wrong.items() if k in ("bias", "main_grads", "options")}
    names = ("phi", "alpha", "beta")
    return lambda: mhc.connect(right["x"], sublayer, *(right[name] for name in names), **rest)


def gate(H=None, alpha=None, beta=None, ms=None, n=4, **others):
    H, ms = t(M, 32) if H is None else H, t(M).abs() if ms is None else ms
    alpha, beta = t(3) if alpha is None else alpha, t(N4) if beta is None else beta
    return lambda: mhc.scale(H, alpha, beta, ms, n, **others)


def sink(H_res=None, n=4, **others):
    return lambda: mhc.sinkhorn(t(M, 4, 4) if H_res is None else H_res, n, **others)


def agg(x=None, H_pre=None, n=4, **others):
    x, pre = t(M, C, 4) if x is None else x, t(M, 4) if H_pre is None else H_pre
    return lambda: mhc.aggregate(x, pre, n, **others)


def top(**wrong):
    right = {"x": t(M, C, 4), "phi": t(4, K), "alpha": t(1), "beta": t(4)} | wrong
    return lambda: mhc.head(**right)


def again(sublayers):
    return lambda: mhc.multilayer_recompute(t(M, C, 4), sublayers, 4)


def copies(embedding, n=4, **others):
    return lambda: mhc.expand_from_embedding(embedding, n, **others)


def inside(offset: int, *shape: int) -> torch.Tensor:
    return BUFFER[offset : offset + math.prod(shape)].view(shape)


CASES = [
    # shapes of x and phi
    ("phi of 20 rows", proj(phi=t(20, K)), ShapeError, ["phi", "24 rows (n = 4)", "[20, 24]"]),
    ("phi transposed", proj(phi=t(25, N4)), ShapeError, ["phi", "8 rows (n = 2)", "[25, 24]"]),
    ("phi 1-D", proj(phi=t(K)), ShapeError, ["phi", "2 dimensions [N, K]", "[24]"]),
    ("phi 3-D", proj(phi=t(1, N4, K)), ShapeError, ["phi", "2 dimensions", "[1, 24, 24]"]),
    ("K no multiple of n", proj(phi=t(N4, K + 1)), ShapeError, ["phi", "multiple of 4", "25"]),
    ("K = 0", proj(phi=t(N4, 0)), ShapeError, ["phi", "multiple of 4", "[24, 0]"]),
    ("C differs where K = n", two(phi=t(N4, 4)), ShapeError, ["x", "n C = 4", "[5, 6, 4]"]),
    ("C of a site where K = n", site(phi=t(N4, 4)), ShapeError, ["x", "n C = 4", "[5, 6, 4]"]),
    ("C of a head where K = n", top(phi=t(4, 4)), ShapeError, ["x", "n C = 4", "[5, 6, 4]"]),
    ("sublayer None", link(None), KIND, ["sublayer", "a callable", "NoneType"]),
    ("module of None", lambda: mhc.HyperConnection(None, C), KIND, ["sublayer", "NoneType"]),
    (
        "a main_grad of connect by an unknown name",
        link(main_grads={"fi": t(N4, K)}),
        VALUE,
        ["main_grads", "'bias'", "fi"],
    ),
    (
        "main_grads of connect a list",
        link(main_grads=[t(C)]),
        KIND,
        ["main_grads", "bias", "list"],
    ),
    ("K differs", proj(phi=t(N4, K + 4)), ShapeError, ["x", "n C = 28", "[5, 6, 4]"]),
    ("n of phi differs", proj(phi=t(8, K)), ShapeError, ["x", "n = 2", "[5, 6, 4]"]),
    ("x of the other layout", proj(x=t(M, 4, C)), ShapeError, ["x", "layout 'cn'", "[5, 4, 6]"]),
    ("layout of x", proj(layout="nc"), ShapeError, ["x", "[..., n, C]", "[5, 6, 4]"]),
    ("x 1-D", proj(x=t(C)), ShapeError, ["x", "[..., C, n]", "[6]"]),
    ("x a scalar", proj(x=t()), ShapeError, ["x", "[..., C, n]", "[]"]),
    ("C = 0", agg(x=t(M, 0, 4)), ShapeError, ["x", "C of 1 or more", "[5, 0, 4]"]),
    ("norm_weight short", proj(norm_weight=t(K - 1)), ShapeError, ["norm_weight", "[24]", "[23]"]),
    ("norm_weight 2-D", site(norm_weight=t(C, 4)), ShapeError, ["norm_weight", "[24]", "[6, 4]"]),
    ("norm_weight of C", two(norm_weight=t(C)), ShapeError, ["norm_weight", "[24]", "[6]"]),
    # shapes of the gates
    ("alpha of 1", site(alpha=t(1)), ShapeError, ["alpha", "[3]", "[1]"]),
    ("alpha of N", gate(alpha=t(N4)), ShapeError, ["alpha", "[3]", "[24]"]),
    ("alpha a scalar", two(alpha=t()), ShapeError, ["alpha", "[3]", "[]"]),
    ("beta of 3", site(beta=t(3)), ShapeError, ["beta", "[24] or [1, 24]", "[3]"]),
    ("beta [N, 1]", gate(beta=t(N4, 1)), ShapeError, ["beta", "[1, 24]", "[24, 1]"]),
    ("beta of another n", gate(beta=t(8)), ShapeError, ["beta", "[24]", "[8]"]),
    ("H too narrow", gate(H=t(M, N4 - 1)), ShapeError, ["H", "24 or more", "[5, 23]"]),
    ("H 1-D", gate(H=t(N4)), ShapeError, ["H", "[M, 24 or more]", "[24]"]),
    ("ms of more tokens", gate(ms=t(M + 1)), ShapeError, ["ms", "[5]", "[6]"]),
    # shapes of coefficients
    ("H_pre of n + 1", agg(H_pre=t(M, 5)), ShapeError, ["H_pre", "[..., 4] of 5", "[5, 5]"]),
    ("H_pre of more tokens", agg(H_pre=t(M + 1, 4)), ShapeError, ["H_pre", "5 tokens", "[6, 4]"]),
    ("H_pre 1-D", agg(H_pre=t(4)), ShapeError, ["H_pre", "[..., 4] of 5", "[4]"]),
    ("H_pre a scalar", agg(t(C, 4), t()), ShapeError, ["H_pre", "[..., 4] of 1", "[]"]),
    ("H_res 1-D", end(H_res=t(16)), ShapeError, ["H_res", "[..., 4, 4] of 5", "[16]"]),
    # sites of a recomputation
    ("sites of 3", again([(t(M, C), t(M, 4), t(M, 4, 4))]), KIND, ["sublayers[0]", "3 values"]),
    ("sites of tensors", again([t(M, C)]), KIND, ["sublayers[0]", "(f, bias or None", "Tensor"]),
    ("sites None", again(None), KIND, ["sublayers", "a sequence", "NoneType"]),
    ("H_post of a token", end(H_post=t(1, 4)), ShapeError, ["H_post", "5 tokens", "[1, 4]"]),
    ("H_res flat", end(H_res=t(M, 16)), ShapeError, ["H_res", "[..., 4, 4]", "[5, 16]"]),
    ("H_res of one", two(H_res=t(4, 4)), ShapeError, ["H_res", "5 tokens", "[4, 4]"]),
    ("shifted H_pre", two(H_pre=t(M, 2)), ShapeError, ["H_pre", "[..., 4]", "[5, 2]"]),
    ("logits [M, n]", sink(t(M, 4)), ShapeError, ["H_res", "[M, 16]", "[5, 4]"]),
    ("logits of another n", sink(t(M, 4, 4), 2), ShapeError, ["H_res", "[..., 2, 2]", "[5, 4, 4]"]),
    ("logits 3-D, flat", sink(t(1, M, 16)), ShapeError, ["H_res", "[M, 16]", "[1, 5, 16]"]),
    # shapes of f and bias
    ("f of C + 1", end(f=t(M, C + 1)), ShapeError, ["f", "[..., 6]", "[5, 7]"]),
    ("f of fewer tokens", two(f=t(M - 1, C)), ShapeError, ["f", "5 tokens", "[4, 6]"]),
    ("f a scalar", end(f=t()), ShapeError, ["f", "[..., 6]", "[]"]),
    ("bias [1, C]", end(bias=t(1, C)), ShapeError, ["bias", "[6]", "[1, 6]"]),
    ("bias of K", link(bias=t(K)), ShapeError, ["bias", "[6]", "[24]"]),
    ("sublayer widens", link(lambda o: torch.cat([o, o], -1)), ShapeError, ["sublayer", "[5, 12]"]),
    ("sublayer drops tokens", link(lambda o: o[1:]), ShapeError, ["sublayer(out)", "[4, 6]"]),
    # head, embedding
    ("head of N rows", top(phi=t(N4, K)), ShapeError, ["phi", "2 or 4 rows", "[24, 24]"]),
    ("head of 3 rows", top(phi=t(3, K)), ShapeError, ["phi", "2 or 4 rows", "[3, 24]"]),
    ("head's alpha of 3", top(alpha=t(3)), ShapeError, ["alpha", "[1]", "[3]"]),
    ("head's beta of N", top(beta=t(N4)), ShapeError, ["beta", "[4]", "[24]"]),
    ("head's beta [1, n]", top(beta=t(1, 4)), ShapeError, ["beta", "[4]", "[1, 4]"]),
    ("head's phi 1-D", top(phi=t(K)), ShapeError, ["phi", "2 dimensions [n, K]", "[24]"]),
    ("embedding a scalar", copies(t()), ShapeError, ["embedding", "[]"]),
    ("embedding of C = 0", copies(t(M, 0)), ShapeError, ["embedding", "[5, 0]"]),
    # dtypes
    ("x fp16", proj(x=t(M, C, 4, dtype=FP16)), DtypeError, ["x", "torch.float16"]),
    ("x fp64", agg(x=t(M, C, 4).double()), DtypeError, ["x", "torch.float64"]),
    ("x int", agg(x=torch.ones(M, C, 4).long()), DtypeError, ["x", "torch.int64"]),
    ("phi fp16", site(phi=t(N4, K, dtype=FP16)), DtypeError, ["phi", "torch.float16"]),
    ("alpha fp64", site(alpha=t(3).double()), DtypeError, ["alpha", "torch.float64"]),
    ("beta fp16", gate(beta=t(N4).half()), DtypeError, ["beta", "torch.float16"]),
    ("norm_weight int", proj(norm_weight=t(K).int()), DtypeError, ["norm_weight", "int32"]),
    ("f of another dtype", end(f=t(M, C, dtype=BF16)), DtypeError, ["f", "dtype of x", "bfloat16"]),
    ("bias of another dtype", end(bias=t(C).bfloat16()), DtypeError, ["bias", "dtype of x"]),
    ("sublayer's dtype", link(lambda o: o.bfloat16()), DtypeError, ["sublayer(out)", "bfloat16"]),
    ("H_pre bf16", agg(H_pre=t(M, 4, dtype=BF16)), DtypeError, ["H_pre", "bfloat16"]),
    ("H_post bf16", end(H_post=t(M, 4).bfloat16()), DtypeError, ["H_post", "bfloat16"]),
    ("H_res fp64", two(H_res=t(M, 4, 4).double()), DtypeError, ["H_res", "float64"]),
    ("logits bf16", sink(t(M, 4, 4).bfloat16()), DtypeError, ["H_res", "bfloat16"]),
    ("H bf16", gate(H=t(M, 32).bfloat16()), DtypeError, ["H", "bfloat16"]),
    ("ms fp64", gate(ms=t(M).double()), DtypeError, ["ms", "float64"]),
    ("embedding bool", copies(torch.ones(M, C).bool()), DtypeError, ["embedding", "bool"]),
    # types
    ("x a list", proj(x=[1.0]), KIND, ["x", "torch.Tensor", "list"]),
    ("x None", agg(x=0.5), KIND, ["x", "float"]),
    ("phi a module", proj(phi=torch.nn.Linear(2, 2)), KIND, ["phi", "Linear"]),
    ("alpha a float", site(alpha=0.01), KIND, ["alpha", "float"]),
    ("beta None", site(beta=None), KIND, ["beta", "NoneType"]),
    ("bias a number", end(bias=0.0), KIND, ["bias", "float"]),
    ("f None", end(f=None), KIND, ["f", "NoneType"]),
    ("sublayer returns a tuple", link(lambda o: (o,)), KIND, ["sublayer(out)", "tuple"]),
    ("x sparse", agg(x=t(M, C, 4).to_sparse()), KIND, ["x", "dense"]),
    ("x nested", agg(x=nested()), KIND, ["x", "a nested tensor"]),
    ("options a dict", site(options={"layout": "nc"}), KIND, ["options", "mhc.Options", "dict"]),
    ("options None", two(options=None), KIND, ["options", "NoneType"]),
    ("embedding a list", copies([1.0]), KIND, ["embedding", "list"]),
    # numbers
    ("n = 3", agg(n=3), VALUE, ["n", "2, 4", "3"]),
    ("n = 8", sink(n=8), VALUE, ["n", "8"]),
    ("n a float", agg(n=4.0), KIND, ["n", "an int", "float"]),
    ("n True", end(n=True), KIND, ["n", "bool"]),
    ("n None", gate(n=None), KIND, ["n", "NoneType"]),
    ("n of copies", copies(t(M, C), 5), VALUE, ["n", "5"]),
    ("layout", agg(layout="cm"), VALUE, ["layout", "'cn'", "cm"]),
    ("layout None", end(layout=None), VALUE, ["layout", "None"]),
    ("layout of options", with_option(layout="CN"), VALUE, ["layout", "CN"]),
    ("layout of copies", copies(t(M, C), layout="n"), VALUE, ["layout", "'nc'"]),
    ("a layout that is a list", agg(layout=["cn"]), VALUE, ["layout", "cn"]),
    ("precision", proj(precision="tf32"), VALUE, ["precision", "'bf16x2'", "tf32"]),
    ("precision of options", with_option(precision="bf16"), VALUE, ["precision", "bf16x3"]),
    ("iterations 0", sink(iterations=0), VALUE, ["iterations", "1 to 64", "0"]),
    ("iterations 65", with_option(iterations=65), VALUE, ["iterations", "1 to 64", "65"]),
    ("iterations of log", sink(iterations=27), VALUE, ["iterations", "1 to 26", "'log'", "27"]),
    ("iterations of options", with_option(iterations=64), VALUE, ["iterations", "1 to 26"]),
    ("form_eps 0", with_option(form="epsilon", form_eps=0.0), VALUE, ["form_eps", "1e-30"]),
    ("Sinkhorn's eps negative", sink(eps=-1), VALUE, ["eps: ", "0 or more", "-1"]),
    ("iterations a float", sink(iterations=20.0), KIND, ["iterations", "an int", "float"]),
    ("iterations True", with_option(iterations=True), KIND, ["iterations", "bool"]),
    ("form", sink(form="exp"), VALUE, ["form", "'log'", "exp"]),
    ("form of options", with_option(form=None), VALUE, ["form", "None"]),
    ("form_eps negative", with_option(form_eps=-1e-6), VALUE, ["form_eps", "0 or more"]),
    ("Sinkhorn's eps NaN", sink(eps=math.nan), VALUE, ["eps", "nan"]),
    ("eps negative", gate(eps=-1e-6), VALUE, ["eps", "0 or more", "-1e-06"]),
    ("eps inf", with_option(eps=math.inf), VALUE, ["eps", "finite", "inf"]),
    ("eps a tensor", gate(eps=t()), KIND, ["eps", "a number", "Tensor"]),
    ("pre_eps negative", gate(pre_eps=-1.0), VALUE, ["pre_eps", "0 or more"]),
    ("pre_eps None", with_option(pre_eps=None), KIND, ["pre_eps", "NoneType"]),
    ("post_scale NaN", gate(post_scale=math.nan), VALUE, ["post_scale", "finite", "nan"]),
    ("post_scale a string", with_option(post_scale="2"), KIND, ["post_scale", "str"]),
    # main_grads
    ("mains a tensor", proj(main_grads=t(N4, K)), KIND, ["main_grads", "phi", "Tensor"]),
    ("mains a list", link(main_grads=[t(N4, K)]), KIND, ["main_grads", "list"]),
    ("a main of nothing", proj(main_grads={"psi": t(N4, K)}), VALUE, ["main_grads", "psi"]),
    ("a main of x", site(main_grads={"x": t(M, C, 4)}), VALUE, ["main_grads", "phi", "x"]),
    ("bias of a site", site(main_grads={"bias": t(C)}), VALUE, ["main_grads", "bias"]),
    ("phi of an end", end(main_grads={"phi": t(N4, K)}), VALUE, ["main_grads", "phi"]),
    (
        "no norm_weight",
        proj(main_grads={"norm_weight": t(K)}),
        VALUE,
        ["main_grads['norm_weight']", "none without norm_weight"],
    ),
    ("no bias", end(main_grads={"bias": t(C)}), VALUE, ["main_grads['bias']", "without bias"]),
    ("no bias to connect", link(main_grads={"bias": t(C)}), VALUE, ["main_grads['bias']"]),
    ("main a list", proj(main_grads={"phi": [1.0]}), KIND, ["main_grads['phi']", "list"]),
    (
        "main transposed",
        proj(main_grads={"phi": t(K + 4, N4)}),
        ShapeError,
        ["main_grads['phi']", "[24, 24], that of phi", "[28, 24]"],
    ),
    (
        "main of beta flat",
        gate(beta=t(1, N4), main_grads={"beta": t(N4)}),
        ShapeError,
        ["main_grads['beta']", "[1, 24]", "[24]"],
    ),
    (
        "main of a whole phi",
        top(main_grads={"phi": t(N4, K)}),
        ShapeError,
        ["main_grads['phi']", "[4, 24], that of phi", "[24, 24]"],
    ),
    (
        "main of three alphas",
        top(main_grads={"alpha": t(3)}),
        ShapeError,
        ["main_grads['alpha']", "[1], that of alpha", "[3]"],
    ),
    ("a head's bias", top(main_grads={"bias": t(C)}), VALUE, ["main_grads", "phi", "bias"]),
    (
        "a head without norm_weight",
        top(main_grads={"norm_weight": t(K)}),
        VALUE,
        ["main_grads['norm_weight']", "none without norm_weight"],
    ),
    ("a head's main a list", top(main_grads=[t(4, K)]), KIND, ["main_grads", "list"]),
    (
        "a head's main bf16",
        top(main_grads={"beta": t(4).bfloat16()}),
        DtypeError,
        ["main_grads['beta']", "float32", "bfloat16"],
    ),
    (
        "a head's main overlaps x",
        top(x=inside(0, M, C, 4), main_grads={"alpha": inside(100, 1)}),
        AliasError,
        ["main_grad", "alias of"],
    ),
    (
        "one buffer for two main_grads",
        site(main_grads={"phi": inside(0, N4, K), "beta": inside(24, N4)}),
        AliasError,
        ["main_grads['phi']", "alias of main_grads['beta']"],
    ),
    (
        "a main_grad of a site overlaps alpha",
        two(alpha=inside(3, 3), main_grads={"beta": inside(0, N4)}),
        AliasError,
        ["main_grads['beta']", "alias of alpha"],
    ),
    (
        "main_grad of bias overlaps H_post",
        end(bias=t(C), H_post=inside(0, M, 4), main_grads={"bias": inside(8, C)}),
        AliasError,
        ["main_grads['bias']", "alias of H_post"],
    ),
    (
        "main bf16",
        site(main_grads={"alpha": t(3).bfloat16()}),
        DtypeError,
        ["main_grads['alpha']", "float32", "bfloat16"],
    ),
    (
        "main needs a gradient",
        two(main_grads={"phi": t(N4, K).requires_grad_()}),
        VALUE,
        ["main_grads['phi']", "requires_grad=False"],
    ),
    (
        "main expanded",
        end(bias=t(C), main_grads={"bias": t(1).expand(C)}),
        AliasError,
        ["main_grads['bias']", "distinct addresses"],
    ),
    (
        "main on meta",
        proj(main_grads={"phi": t(N4, K, device="meta")}),
        DeviceError,
        ["main_grads['phi']", "meta"],
    ),
    (
        "main is phi",
        proj(phi=inside(0, N4, K), main_grads={"phi": inside(0, N4, K)}),
        AliasError,
        ["main_grad", "alias of"],
    ),
    (
        "main overlaps x",
        site(x=inside(0, M, C, 4), main_grads={"phi": inside(100, N4, K)}),
        AliasError,
        ["main_grad", "alias of"],
    ),
    # devices
    ("phi on meta", proj(phi=t(N4, K, device="meta")), DeviceError, ["phi", "cpu", "meta"]),
    ("x on meta", site(x=t(M, C, 4, device="meta")), DeviceError, ["phi", "meta", "cpu"]),
    ("alpha on meta", site(alpha=t(3, device="meta")), DeviceError, ["alpha", "meta"]),
    ("beta on meta", gate(beta=t(N4, device="meta")), DeviceError, ["beta", "meta"]),
    ("ms on meta", gate(ms=t(M, device="meta")), DeviceError, ["ms", "meta"]),
    ("H_pre on meta", agg(H_pre=t(M, 4, device="meta")), DeviceError, ["H_pre", "of x", "meta"]),
    ("f on meta", end(f=t(M, C, device="meta")), DeviceError, ["f", "of x", "meta"]),
    ("bias on meta", end(bias=t(C, device="meta")), DeviceError, ["bias", "of x", "meta"]),
    ("norm_weight on meta", proj(norm_weight=t(K, device="meta")), DeviceError, ["norm_weight"]),
    # queries
    ("id on meta", lambda: ck.contract_id("mhc", "meta"), BackendUnavailable, ["cpu"]),
]  # fmt: skip


def test_the_table_is_long_enough():
    assert len(CASES) >= 100
    assert len({case[0] for case in CASES}) == len(CASES)


@pytest.mark.parametrize(("label", "call", "error", "fragments"), CASES, ids=lambda v: str(v)[:24])
def test_bad_input(label, call, error, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert isinstance(caught.value, ValueError | TypeError | RuntimeError)
    assert all(fragment in message for fragment in fragments), message


def test_the_right_ones_are_right():
    """Each of the table's calls, with nothing wrong."""
    for call in (proj(), site(), two(), end(), link(), gate(), sink(), agg(), top(), with_option()):
        assert call() is not None
    assert copies(t(M, C))().shape == (M, C, 4)


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_devices_without_a_backend_are_refused(device):
    """No such device is here, so the check is told of one."""
    from cute_kernels.runtime import checking

    with pytest.raises(BackendUnavailable, match=f"no backend for {device}"):
        checking.supported("mhc", torch.device(device))


def test_a_forced_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cute_sm90")
    for call in (proj(), site(), two(), end(), sink(), agg()):
        with pytest.raises(BackendUnavailable):
            call()


def test_nothing_is_written_by_a_refused_call():
    right = given(bias=t(C).requires_grad_())
    state = torch.ones(C)
    with pytest.raises(ShapeError, match=r"sublayer\(out\)"):
        link(lambda out: out[1:], bias=right["bias"], main_grads={"bias": state})()
    assert (state == 1).all() and right["bias"].grad is None
