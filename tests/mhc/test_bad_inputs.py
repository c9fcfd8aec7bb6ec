"""Bad inputs of mhc, in one table: each names the argument, what was expected, what came."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
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
    DtypeError,
    ShapeError,
)
from cute_kernels.mhc import HyperConnection, HyperHead, Options, recompute_streams, te
from cute_kernels.runtime import checking
from tests.mhc import cases

M, C, N4 = 5, 6, 24
K = 4 * C
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BUFFER = cases.normal(4 * N4 * K, seed=1)
IDENTITY = torch.nn.Identity()


def t(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> torch.Tensor:
    return cases.normal(*shape, seed=sum(shape)).to(device, dtype)


def meta(*shape: int) -> torch.Tensor:
    return t(*shape, device="meta")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: "is in prototype stage"
        return torch.nested.nested_tensor([t(3, C, 4), t(2, C, 4)])


def inside(offset: int, *shape: int) -> torch.Tensor:
    return BUFFER[offset : offset + math.prod(shape)].view(shape)


#: Right arguments of every function.
RIGHT = {
    "x": t(M, C, 4),
    "phi": t(N4, K),
    "alpha": t(3),
    "beta": t(N4),
    "f": t(M, C),
    "bias": None,
    "H_pre": t(M, 4),
    "H_post": t(M, 4),
    "H_res": t(M, 4, 4),
    "H": t(M, 32),
    "ms": t(M).abs(),
    "n": 4,
    "sublayer": torch.tanh,
}


def right(function: Callable, names: str, **own) -> Callable:
    """A call with right arguments, ``names`` by position, but for what is wrong."""

    def with_wrong(**wrong):
        given = RIGHT | own | wrong
        others = {name: value for name, value in wrong.items() if name not in names.split()}
        return lambda: function(*(given[name] for name in names.split()), **others)

    return with_wrong


proj = right(mhc.projection, "x phi")
site = right(mhc.mix_and_aggregate, "x phi alpha beta")
two = right(mhc.post_pre, "f bias H_post x H_res phi alpha beta")
end = right(mhc.expand_combine, "f bias H_post x H_res n")
link = right(mhc.connect, "x sublayer phi alpha beta")
gate = right(mhc.scale, "H alpha beta ms n")
sink = right(mhc.sinkhorn, "H_res n")
agg = right(mhc.aggregate, "x H_pre n")
top = right(mhc.head, "x phi alpha beta", phi=t(4, K), alpha=t(1), beta=t(4))
copies = right(mhc.expand_from_embedding, "f n")
again = right(mhc.multilayer_recompute, "x sublayers n")
from_te = right(mhc.from_transformer_engine, "phi alpha beta")
from_tk = right(mhc.from_tilekernels, "phi alpha beta")
columns = right(mhc.permute_columns, "phi n")
te_site = right(te.mhc_generate_mix_and_aggregate, "x phi alpha beta")
te_sink = right(te.mhc_fused_sinkhorn, "H_res")
te_agg = right(te.mhc_fused_aggregate, "x H_pre n")
te_end = right(te.mhc_fused_expand_combine, "f bias H_post x H_res n")


def with_option(**wrong):
    return site(options=replace(Options(), **wrong))


def module(cls: type = HyperConnection, x: torch.Tensor | None = None, **wrong):
    """A module, called on x if there is one."""
    given = {"sublayer": IDENTITY} if cls is HyperConnection else {}
    given |= {"channels": C} | wrong
    return lambda: cls(**given) if x is None else cls(**given)(x)


def main_grad_of_module():
    own = HyperConnection(IDENTITY, C)
    own.alpha.main_grad = torch.zeros(3, dtype=BF16)
    return own(t(M, C, 4))


MAIN = "main_grads['{}']".format
#: Exception -> (call, fragments of its message).
CASES = {
    ShapeError: [
        (proj(x=torch.empty(2**31, C, 4, device="meta")), "x|sizes of at most 2147483647"),
        (proj(phi=t(20, K)), "phi|24 rows (n = 4)|[20, 24]"),
        (proj(phi=t(K)), "phi|2 dimensions [N, K]|[24]"),
        (proj(phi=t(1, N4, K)), "phi|2 dimensions|[1, 24, 24]"),
        (proj(phi=t(N4, K + 1)), "phi|multiple of 4|25"),
        (proj(phi=t(N4, 0)), "phi|multiple of 4|[24, 0]"),
        (two(phi=t(N4, 4)), "x|n C = 4|[5, 6, 4]"),
        (site(phi=t(N4, 4)), "x|n C = 4|[5, 6, 4]"),
        (top(phi=t(4, 4)), "x|n C = 4|[5, 6, 4]"),
        (proj(phi=t(N4, K + 4)), "x|n C = 28|[5, 6, 4]"),
        (proj(phi=t(8, K)), "x|n = 2|[5, 6, 4]"),
        (proj(x=t(M, 4, C)), "x|layout 'cn'|[5, 4, 6]"),
        (proj(layout="nc"), "x|[..., n, C]|[5, 6, 4]"),
        (proj(x=t(C)), "x|[..., C, n]|[6]"),
        (proj(x=t()), "x|[..., C, n]|[]"),
        (agg(x=t(M, 0, 4)), "x|C of 1 or more|[5, 0, 4]"),
        (proj(norm_weight=t(K - 1)), "norm_weight|[24]|[23]"),
        (site(norm_weight=t(C, 4)), "norm_weight|[24]|[6, 4]"),
        (two(norm_weight=t(C)), "norm_weight|[24]|[6]"),
        (site(alpha=t(1)), "alpha|[3]|[1]"),
        (gate(alpha=t(N4)), "alpha|[3]|[24]"),
        (two(alpha=t()), "alpha|[3]|[]"),
        (site(beta=t(3)), "beta|[24] or [1, 24]|[3]"),
        (gate(beta=t(N4, 1)), "beta|[1, 24]|[24, 1]"),
        (gate(H=t(M, N4 - 1)), "H|24 or more|[5, 23]"),
        (gate(H=t(N4)), "H|[M, 24 or more]|[24]"),
        (gate(ms=t(M + 1)), "ms|[5]|[6]"),
        (agg(H_pre=t(M, 5)), "H_pre|[..., 4] of 5|[5, 5]"),
        (agg(H_pre=t(M + 1, 4)), "H_pre|5 tokens|[6, 4]"),
        (agg(x=t(C, 4), H_pre=t()), "H_pre|[..., 4] of 1|[]"),
        (end(H_post=t(1, 4)), "H_post|5 tokens|[1, 4]"),
        (end(H_res=t(M, 16)), "H_res|[..., 4, 4]|[5, 16]"),
        (two(H_res=t(4, 4)), "H_res|5 tokens|[4, 4]"),
        (two(H_pre=t(M, 2)), "H_pre|[..., 4]|[5, 2]"),
        (sink(H_res=t(M, 4)), "H_res|[M, 16]|[5, 4]"),
        (sink(n=2), "H_res|[..., 2, 2]|[5, 4, 4]"),
        (sink(H_res=t(1, M, 16)), "H_res|[M, 16]|[1, 5, 16]"),
        (end(f=t(M, C + 1)), "f|[..., 6]|[5, 7]"),
        (two(f=t(M - 1, C)), "f|5 tokens|[4, 6]"),
        (end(f=t()), "f|[..., 6]|[]"),
        (end(bias=t(1, C)), "bias|[6]|[1, 6]"),
        (link(bias=t(K)), "bias|[6]|[24]"),
        (link(sublayer=lambda o: torch.cat([o, o], -1)), "sublayer(out)|[5, 12]"),
        (link(sublayer=lambda o: o[1:]), "sublayer(out)|[4, 6]"),
        (top(phi=t(3, K)), "phi|2 rows (n = 2) or 4 rows (n = 4)|[3, 24]"),
        (top(alpha=t(3)), "alpha|[1]|[3]"),
        (top(beta=t(1, 4)), "beta|[4]|[1, 4]"),
        (top(phi=t(K)), "phi|2 dimensions [n, K]|[24]"),
        (copies(f=t()), "embedding|[]"),
        (copies(f=t(M, 0)), "embedding|[5, 0]"),
        (proj(main_grads={"phi": t(K + 4, N4)}), MAIN("phi") + "|[24, 24], that of phi|[28, 24]"),
        (gate(beta=t(1, N4), main_grads={"beta": t(N4)}), MAIN("beta") + "|[1, 24]|[24]"),
        (top(main_grads={"phi": t(N4, K)}), MAIN("phi") + "|[4, 24], that of phi|[24, 24]"),
        (module(x=t(M, 4, C)), "x: |[5, 4, 6]"),
        (module(x=t(M, 8, 4)), "x: |[5, 8, 4]"),
        (from_te(phi=t(23, 96)), "phi: expected 8 rows (n = 2) or 24 rows (n = 4)"),
        (from_te(phi=t(4, K)), "phi: expected 8 rows (n = 2) or 24 rows (n = 4)"),
        (from_te(phi=t(N4, 95)), "phi: expected columns n C"),
        (from_te(phi=t(N4)), "phi: "),
        (from_te(alpha=t(1)), "alpha: expected 3"),
        (from_te(beta=t(1, 32)), "beta: expected 24"),
        (from_te(norm_weight=t(C)), "norm_weight: expected 24"),
        (from_tk(phi=t(3, K)), "fn: expected 2 rows (n = 2) or 4 rows (n = 4) or 8 rows"),
        (from_tk(alpha=t(1)), "scale: expected 3"),
        (from_tk(beta=t(4)), "base: expected 24"),
        (columns(phi=t(N4, 97), source="cn", target="nc"), "weight: "),
        (lambda: te.mhc_fused_projection(t(M, K), t(8, K)), "phi: expected 24 rows (n = 4)"),
    ],
    DtypeError: [
        (proj(x=t(M, C, 4, dtype=FP16)), "x|torch.float16"),
        (site(phi=t(N4, K, dtype=FP16)), "phi|torch.float16"),
        (gate(beta=t(N4).half()), "beta|torch.float16"),
        (proj(norm_weight=t(K).int()), "norm_weight|int32"),
        (end(f=t(M, C, dtype=BF16)), "f|dtype of x|bfloat16"),
        (end(bias=t(C).bfloat16()), "bias|dtype of x"),
        (link(sublayer=lambda o: o.bfloat16()), "sublayer(out)|bfloat16"),
        (agg(H_pre=t(M, 4, dtype=BF16)), "H_pre|bfloat16"),
        (end(H_post=t(M, 4).bfloat16()), "H_post|bfloat16"),
        (sink(H_res=t(M, 4, 4).bfloat16()), "H_res|bfloat16"),
        (gate(H=t(M, 32).bfloat16()), "H|bfloat16"),
        (module(dtype=FP16), "dtype: "),
        (main_grad_of_module, MAIN("alpha")),
        (from_te(phi=t(N4, K).half()), "phi: "),
    ],
    ArgumentTypeError: [
        (link(sublayer=None), "sublayer|a callable|NoneType"),
        (module(sublayer=None), "sublayer|NoneType"),
        (again(sublayers=[(t(M, C), t(M, 4), t(M, 4, 4))]), "sublayers[0]|3 values"),
        (again(sublayers=[t(M, C)]), "sublayers[0]|(f, bias or None|Tensor"),
        (again(sublayers=None), "sublayers|a sequence|NoneType"),
        (again(sublayers=[], n=True), "n: "),
        (link(sublayer=lambda o: (o,)), "sublayer(out)|tuple"),
        (site(options={"layout": "nc"}), "options|mhc.Options|dict"),
        (end(n=True), "n|bool"),
        (with_option(iterations=True), "iterations|bool"),
        (with_option(pre_eps=None), "pre_eps|NoneType"),
        (with_option(post_scale="2"), "post_scale|str"),
        (proj(main_grads=t(N4, K)), "main_grads|phi|Tensor"),
        (link(main_grads=[t(C)]), "main_grads|bias|list"),
        (module(n="4"), "n: "),
        (module(channels=2.0), "channels: "),
        (module(options={}), "options: "),
        (from_te(phi=None), "phi: "),
        (from_tk(alpha=[1.0, 1.0, 1.0]), "scale: "),
        (lambda: recompute_streams(True), "sites: "),
        (te_site(use_tf32=RIGHT["x"]), "use_tf32: expected"),
        (te_end(n=True), "n: expected"),
    ],
    ArgumentValueError: [
        (agg(n=3), "n|2, 4|3"),
        (again(sublayers=[], n=3), "n: "),
        (agg(layout="cm"), "layout|'cn'|cm"),
        (end(layout=None), "layout|None"),
        (again(sublayers=[], layout="xx"), "layout: "),
        (with_option(layout="CN"), "layout|CN"),
        (copies(layout="n"), "layout|'nc'"),
        (agg(layout=["cn"]), "layout|cn"),
        (proj(precision="tf32"), "precision|'bf16x2'|tf32"),
        (with_option(precision="bf16"), "precision|bf16x3"),
        (sink(iterations=0), "iterations|1 to 64|0"),
        (with_option(iterations=65), "iterations|1 to 64|65"),
        (sink(iterations=27), "iterations|1 to 26|'log'|27"),
        (with_option(form="epsilon", form_eps=0.0), "form_eps|1e-30"),
        (with_option(form_eps=-1e-6), "form_eps|0 or more"),
        (sink(form="exp"), "form|'log'|exp"),
        (sink(eps=-1), "eps: |0 or more|-1"),
        (sink(eps=math.nan), "eps|nan"),
        (gate(eps=-1e-6), "eps|0 or more|-1e-06"),
        (with_option(eps=math.inf), "eps|finite|inf"),
        (gate(pre_eps=-1.0), "pre_eps|0 or more"),
        (gate(post_scale=math.nan), "post_scale|finite|nan"),
        (link(main_grads={"fi": t(N4, K)}), "main_grads|'bias'|fi"),
        (proj(main_grads={"psi": t(N4, K)}), "main_grads|psi"),
        (site(main_grads={"bias": t(C)}), "main_grads|bias"),
        (end(main_grads={"phi": t(N4, K)}), "main_grads|phi"),
        (top(main_grads={"bias": t(C)}), "main_grads|phi|bias"),
        (proj(main_grads={"norm_weight": t(K)}), MAIN("norm_weight") + "|none without norm_weight"),
        (end(main_grads={"bias": t(C)}), MAIN("bias") + "|without bias"),
        (module(n=3), "n: "),
        (module(channels=0), "channels: "),
        (module(options=Options(layout="nchw")), "layout: "),
        (module(HyperHead, n=8), "n: "),
        (module(HyperHead, channels=-C), "channels: "),
        (from_te(layout="bcn"), "layout: "),
        (from_tk(sinkhorn_repeat=0), "iterations: "),
        (from_tk(norm_eps=-1.0), "eps: "),
        (columns(source="cn", target="hw"), "target: "),
        (columns(n=3, source="cn", target="nc"), "n: "),
        (lambda: recompute_streams(0), "sites: "),
        (te_sink(iters=27), "iters: expected"),
        (te_sink(n=2), "n: expected"),
        (te_agg(fused_grad_x_acc_buffer=RIGHT["x"]), "fused_grad_x_acc_buffer: expected"),
    ],
    AliasError: [
        (top(x=inside(0, M, C, 4), main_grads={"alpha": inside(100, 1)}), "main_grad|alias of"),
        (
            site(main_grads={"phi": inside(0, N4, K), "beta": inside(24, N4)}),
            MAIN("phi") + "|alias of " + MAIN("beta"),
        ),
        (
            two(alpha=inside(3, 3), main_grads={"beta": inside(0, N4)}),
            MAIN("beta") + "|alias of alpha",
        ),
        (
            end(bias=t(C), H_post=inside(0, M, 4), main_grads={"bias": inside(8, C)}),
            MAIN("bias") + "|alias of H_post",
        ),
    ],
    BackendUnavailable: [
        (lambda: ck.contract_id("mhc", "meta"), "cpu"),
        (lambda: checking.supported("mhc", torch.device("xpu")), "no backend for xpu"),
    ],
}
ROWS = [(error, *row) for error, rows in CASES.items() for row in rows]


@pytest.mark.parametrize(
    ("error", "call", "fragments"), ROWS, ids=[fragments for *_, fragments in ROWS]
)
def test_bad_input(error, call, fragments):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, errors.CuteKernelsError)
    assert isinstance(caught.value, ValueError | TypeError | RuntimeError)
    assert all(fragment in message for fragment in fragments.split("|")), message


EVERY = (proj(), site(), two(), end(), link(), gate(), sink(), agg(), top(), with_option())


def test_the_right_ones_are_right():
    """Each of the table's calls, with nothing wrong."""
    for call in (*EVERY, again(sublayers=[]), from_te(), from_tk(), te_site(), te_sink(), te_agg()):
        assert call() is not None
    assert copies()().shape == (M, C, 4)


def test_a_forced_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cute_sm90")
    for call in (proj(), site(), two(), end(), sink(), agg()):
        with pytest.raises(BackendUnavailable):
            call()


def test_nothing_is_written_by_a_refused_call():
    bias, state = t(C).requires_grad_(), torch.ones(C)
    with pytest.raises(ShapeError, match=r"sublayer\(out\)"):
        link(sublayer=lambda out: out[1:], bias=bias, main_grads={"bias": state})()
    assert (state == 1).all() and bias.grad is None
