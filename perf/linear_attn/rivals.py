"""Rivals of the bench of linear attention: flash-linear-attention's Triton kernels, and a copy.

FLA's kernels are tuned at their first call, some 80 configurations of a delta rule's two passes,
so their compilations run together; see `tuned_together`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from ..core.bits import same_bytes
from ..core.passes import DIRECTIONS, Inputs, Op, Suite, copied, repeated, starts
from ..core.rival import Call, Rival, by_name, module
from . import exact
from .cases import DECODE, DECODED, DELTAS, GROUPS, MOVED, OPS, Case
from .exact import EPS

DECODING = f"{DECODE} fwd"
#: Relative error beyond which a result is wrong, not rounded: bf16 rounds by 2e-3.
WRONG = 0.05


def _ours() -> dict[str, Op]:
    import cute_kernels as ck

    def norm(before: bool, group: int | None, t: Inputs):
        order = {"norm_before_gate": before, "group_size": group}
        return (ck.gated_rms_norm(t["x"], t["weight"], t["gate"], EPS, **order),)

    return {
        "conv": lambda t: (ck.causal_conv1d_fn(t["x"].mT, t["weight"], activation="silu").mT,),
        "norm_gate": functools.partial(norm, True, None),
        "gate_norm": lambda t: norm(False, t["x"].shape[-1] // GROUPS, t),
        **dict.fromkeys(DELTAS, functools.partial(_rule, ck.chunk_gated_delta_rule)),
    }


#: Names of a delta rule's rows.
ROWS = "q", "k", "v", "g", "beta"


def _ours_decoding(case: Case) -> Call:
    """The next row of each sequence, whose cache stands behind `DECODED` rows at first."""
    caches = {}

    def call(t: Inputs) -> tuple:
        key = id(t["v"])
        if key not in caches:
            caches[key] = _cache_behind({name: _repeated_row(t[name]) for name in ROWS})
        caches[key].gated_delta_rule(*(t[name].detach() for name in ROWS))
        return ()

    return call


def _repeated_row(rows: torch.Tensor) -> torch.Tensor:
    """`DECODED` rows, each sequence with another's."""
    return rows.detach().roll(1, 0).repeat_interleave(DECODED, 1)


def _cache_behind(rows: Inputs):
    """The cache of a layer behind rows [B, T, ...]."""
    import cute_kernels as ck

    (_, _, heads, k), (batch, _, v_heads, v) = rows["k"].shape, rows["v"].shape
    sizes = {"heads": (heads, v_heads), "sizes": (k, v), "conv": (v, 4)}
    like = {"dtype": rows["v"].dtype, "device": rows["v"].device}
    cache = ck.LinearAttentionCache(1, batch, **sizes, **like)[0]
    cache.gated_delta_rule(*(rows[name] for name in ROWS))
    return cache


def _fla_decoding(case: Case) -> Call:
    """The next row of each sequence behind a state, which is written anew."""
    rule = module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule

    def call(t: Inputs) -> tuple:
        with torch.no_grad():
            rows = {name: t[name] for name in ROWS}
            rule(**rows, initial_state=t["state"], output_final_state=True)
        return ()

    return call


def _steps_keep_bytes(case: Case, t: Inputs) -> dict:
    """Whether 70 steps have the bytes of one pass, for as many sequences as there are, up to 64."""
    import cute_kernels as ck

    few = replace(case, batch=min(case.batch, 64), rows=DECODED + 70, op="delta")
    rows = {name: value.detach() for name, value in few.inputs(1, t["v"].device.type).items()}
    cache = _cache_behind({name: rows[name][:, :DECODED] for name in ROWS})
    whole, _ = ck.chunk_gated_delta_rule(*(rows[name] for name in ROWS))
    return {
        "bitwise": {
            "one pass": all(
                same_bytes(
                    cache.gated_delta_rule(*(rows[name][:, i : i + 1] for name in ROWS)),
                    whole[:, i : i + 1],
                )
                for i in range(DECODED, few.rows)
            )
        }
    }


def _fla() -> dict[str, Op]:
    conv = module("fla.modules.convolution").causal_conv1d
    before = module("fla.modules.fused_norm_gate").rms_norm_gated
    after = module("fla.modules.layernorm_gated").rmsnorm_fn
    rule = module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def gate_norm(t: Inputs):
        order = {"group_size": t["x"].shape[-1] // GROUPS, "norm_before_gate": False}
        return (after(t["x"], t["weight"], None, t["gate"], EPS, **order),)

    return {
        "conv": lambda t: conv(t["x"], t["weight"], activation="silu")[:1],
        "norm_gate": lambda t: (before(t["x"], t["gate"], t["weight"], None, eps=EPS),),
        "gate_norm": gate_norm,
        **dict.fromkeys(DELTAS, functools.partial(_rule, rule)),
    }


def _rule(run: Op, t: Inputs):
    """Both libraries have the names and layouts of flash-linear-attention."""
    gate = {name: t[name] for name in ("A_log", "dt_bias") if name in t}
    if gate:
        gate |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    return run(t["q"], t["k"], t["v"], t["g"], t["beta"], **gate)[:1]


@functools.lru_cache(maxsize=1)
def _checked(case: Case, device: str) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """Operands of a case, and its results in float64, for one rival after the other."""
    t = case.inputs(0, device)
    return t, exact.results(case, t)


def check(rival: Rival, call: Call, case: Case, t: Inputs) -> dict:
    """Errors against float64, each result's; ValueError if one is wrong.  Then the bytes."""
    if case.op == DECODE:
        return _steps_keep_bytes(case, t) if rival.promised else {"bitwise": {}}
    small = case.checked()
    operands, expected = _checked(small, next(iter(t.values())).device.type)
    # A call of its own: one of a backward keeps its graphs.
    results = rival.start[case.product](small)(operands)
    if not results:
        return {"bitwise": {}}
    errors = {}
    for (name, want), result in zip(expected.items(), results, strict=True):
        difference = small.part(name, result.detach()).double() - want
        errors[name] = float(difference.norm() / want.norm())
    if not max(errors.values()) <= WRONG:
        raise ValueError(f"errors against float64: expected at most {WRONG}, got {errors}")
    worst = {"relative_error": max(errors.values()), "errors": errors, "rows": small.rows}
    return repeated(rival, call, case, t) | {"check": worst}


@contextlib.contextmanager
def tuned_together(workers: int = min(16, os.cpu_count() or 1)) -> Iterator[None]:
    """Triton's autotuners compile all configurations of a kernel together, before they time one."""
    from triton.runtime import _async_compile
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def compile_all(tuner, kwargs: dict):
        configs = prune(tuner, kwargs)
        # A configuration that cannot be compiled raises again where the tuner runs it.
        with (
            ThreadPoolExecutor(workers) as pool,
            _async_compile.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for config in configs:
                options = kwargs | {"warmup": True} | config.all_kwargs()
                tuner.fn.run(*tuner.nargs.values(), **options)
        return configs

    Autotuner.prune_configs = compile_all
    try:
        yield
    finally:
        Autotuner.prune_configs = prune


RIVALS = by_name(
    Rival("ours", starts(OPS, _ours) | {DECODING: _ours_decoding}, promised=True, ordered=True),
    Rival("fla", starts(OPS, _fla) | {DECODING: _fla_decoding}),
    Rival(
        "copy", {f"{op} {way}": copied for op in MOVED for way in DIRECTIONS} | {DECODING: copied}
    ),
)
_CONTRACTS = dict.fromkeys(MOVED, "gated_rms_norm") | {"conv": "causal_conv1d_fn"}
SUITE = Suite(
    "linear_attn",
    "chunk_gated_delta_rule",
    RIVALS,
    check,
    ops={f"{op} {way}": name for op, name in _CONTRACTS.items() for way in DIRECTIONS},
)
