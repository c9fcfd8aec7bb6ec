"""Calls of every op that has a main_grad."""

from __future__ import annotations

import functools

import torch

import cute_kernels as ck
from tests.mhc import calls as mhc_calls
from tests.mhc import cases as mhc_cases
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32
M, N, K = 6, 24, 40
OFFSETS = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
IDS = torch.tensor([3, 1, 3, 0, 9, 1])
TAPS = drawn(K, 4, seed=7, dtype=FP32)


def gated(
    x: torch.Tensor, A_log: torch.Tensor, dt_bias, rule=ck.chunk_gated_delta_rule, **main_grads
) -> torch.Tensor:
    """Rows [M, 16] of a gated delta rule, all of whose rows are of x [M, K]."""
    q, k, v, a, beta, _ = x[None].split((8, 8, 16, 2, 2, 4), 2)
    q, k, v = (t.unflatten(2, (-1, 8)) for t in (q, k, v))
    if rule is ck.chunk_kda:
        a = a[..., None] + v
    out, _ = rule(
        q, k, v, a, beta, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, **main_grads,
    )  # fmt: skip
    return out[0].flatten(1)


def scanned(x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
    """Rows [M, 16] of a state space scan, all of whose rows are of x [M, K]."""
    rows, dt, B, C, _ = x[None].split((16, 2, 8, 8, 6), 2)
    rows, B, C = (t.unflatten(2, (-1, 8)) for t in (rows, B, C))
    parameters = {"A": -TAPS[:2, 0].abs()} | parameters
    out = ck.mamba_chunk_scan_combined(rows, dt, B=B, C=C, dt_softplus=True, **parameters)
    return out[0].flatten(1)


def scanned_by_channel(x: torch.Tensor, **parameters: torch.Tensor) -> torch.Tensor:
    """Rows [M, 8] of a selective scan, all of whose rows are of x [M, K]."""
    u, delta, B, C, _ = x[None].mT.split((8, 8, 4, 4, 16), 1)
    parameters = {"A": -TAPS[:8].abs()} | parameters
    return ck.selective_scan(u, delta, B=B, C=C, delta_softplus=True, **parameters)[0].mT


#: Op -> (call of rows x [M, K], a weight and its main_grad; the weight's shape).
CALLS = {
    "linear": (lambda x, w, m: ck.linear(x, w, main_grad=m), (N, K)),
    "linear, tree": (lambda x, w, m: ck.linear(x, w, order="tree", main_grad=m), (N, K)),
    "grouped_linear": (lambda x, w, m: ck.grouped_linear(x, w, OFFSETS, main_grad=m), (3, N, K)),
    "linear_logp": (
        lambda x, w, m: sum(ck.linear_logp(x, w, IDS, return_entropy=True, main_grad=m)), (N, K),
    ),
    "causal_conv1d_fn": (
        lambda x, w, m: ck.causal_conv1d_fn(x.mT[None], w, main_grad=m)[0].mT, (K, 4),
    ),
    "causal_conv1d_fn, bias": (
        lambda x, w, m: ck.causal_conv1d_fn(
            x.mT[None], TAPS, w, activation="silu", bias_main_grad=m
        )[0].mT, (K,),
    ),
    "chunk_gated_delta_rule, A_log": (lambda x, w, m: gated(x, w, None, A_log_main_grad=m), (2,)),
    "chunk_gated_delta_rule, dt_bias": (
        lambda x, w, m: gated(x, TAPS[:2, 0], w, dt_bias_main_grad=m), (2,),
    ),
    "chunk_kda, A_log": (
        lambda x, w, m: gated(x, w, None, ck.chunk_kda, A_log_main_grad=m), (2,),
    ),
    "chunk_kda, dt_bias": (
        lambda x, w, m: gated(x, TAPS[:2, 0], w, ck.chunk_kda, dt_bias_main_grad=m), (16,),
    ),
    "mamba_chunk_scan_combined, A": (lambda x, w, m: scanned(x, A=w, A_main_grad=m), (2,)),
    "mamba_chunk_scan_combined, D": (lambda x, w, m: scanned(x, D=w, D_main_grad=m), (2, 8)),
    "mamba_chunk_scan_combined, dt_bias": (
        lambda x, w, m: scanned(x, dt_bias=w, dt_bias_main_grad=m), (2,),
    ),
    "selective_scan, A": (lambda x, w, m: scanned_by_channel(x, A=w, A_main_grad=m), (8, 4)),
    "selective_scan, D": (lambda x, w, m: scanned_by_channel(x, D=w, D_main_grad=m), (8,)),
    "selective_scan, delta_bias": (
        lambda x, w, m: scanned_by_channel(x, delta_bias=w, delta_bias_main_grad=m), (8,),
    ),
    "gated_rms_norm": (
        lambda x, w, m: ck.gated_rms_norm(
            x, w, x + 1, 1e-6, norm_before_gate=False, group_size=20, main_grad=m
        ), (K,),
    ),
    "embedding": (lambda x, w, m: x * ck.embedding(IDS, w, main_grad=m), (N, K)),
    "rms_norm": (lambda x, w, m: ck.rms_norm(x, w, main_grad=m), (K,)),
    "layer_norm": (lambda x, w, m: ck.layer_norm(x, w, main_grad=m), (K,)),
    "layer_norm, bias": (lambda x, w, m: ck.layer_norm(x, None, w, bias_main_grad=m), (K,)),
}  # fmt: skip
#: Those whose operands autocast casts.
CAST = ("linear", "linear, tree", "grouped_linear", "linear_logp")
SITE = mhc_calls.case_of(FP32, 2, "cn", K // 2)._replace(m=M)


@functools.cache
def inputs_of(name: str) -> mhc_cases.Inputs:
    return mhc_calls.inputs_of(name, SITE)


def of_site(name: str, weight: str, x: torch.Tensor, w: torch.Tensor, main) -> torch.Tensor:
    """A function of mhc whose one weight is ``w``; x gives its tokens."""
    i = inputs_of(name)
    fields = {weight: w, "f": x[:, : SITE.c] if "f" in mhc_calls.CALLS[name].leaves else i.f}
    fields["x"] = x.view(M, SITE.c, SITE.n)
    mains = None if main is None else {weight: main}
    out = mhc_calls.CALLS[name](i._replace(**fields), SITE, mains)
    return torch.cat([t.reshape(M, -1) for t in out], 1)


for _name in mhc_calls.WEIGHED:
    for _weight in mhc_calls.CALLS[_name].weights:
        _shape = getattr(inputs_of(_name), _weight).shape
        CALLS[f"mhc.{_name}, {_weight}"] = (functools.partial(of_site, _name, _weight), _shape)


def parameter(name: str) -> torch.nn.Parameter:
    """Parameter as Megatron has it: with a main_grad that is not zero, and the flag."""
    shape = CALLS[name][1]
    out = torch.nn.Parameter(drawn(*shape, seed=1, dtype=FP32))
    out.main_grad, out.grad_added_to_main_grad = drawn(*shape, seed=2, dtype=FP32), False
    return out


def rows(dtype: torch.dtype = FP32) -> torch.Tensor:
    return drawn(M, K, seed=3, dtype=dtype).requires_grad_()


def run(name: str, x: torch.Tensor, weight: torch.Tensor, main) -> torch.Tensor:
    return CALLS[name][0](x, weight, main)


def upstream(y: torch.Tensor) -> torch.Tensor:
    return drawn(*y.shape, seed=4, dtype=y.dtype)


def written(name: str) -> torch.Tensor:
    """The main_grad after a plain backward."""
    weight = parameter(name)
    y = run(name, rows(), weight, weight.main_grad)
    y.backward(upstream(y))
    return weight.main_grad
