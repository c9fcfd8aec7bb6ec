"""Cases of linear attention."""

from __future__ import annotations

import functools

import torch

from cute_kernels import arch
from cute_kernels.linear_attn.tensors import DeltaRule, GatedRule, StateSpace
from cute_kernels.runtime import dispatch
from tests.linear_attn import ssd_cases
from tests.linear_attn.delta_cases import Case, exact, gate_parameters, operands, upstream
from tests.mhc.cases import shares
from tests.option_table.calls import Cases, call
from tests.option_table.rows import cases, leaf
from tests.oracles import linear_attn as oracle
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32
CHANNELS, LENGTH = 24, 70
OFFSETS = torch.tensor([0, 5, 5, 69], dtype=torch.int32)
#: Calls of a delta rule: two chunks of a size that GPUs take.
DELTA = Case((66,), batch=2, heads=(1, 2), sizes=(64, 64), initial=False)
DELTA_PACK = DELTA._replace(lengths=(5, 0, 66), batch=0, behind=3)
GATES = {channels: gate_parameters(DELTA._replace(channels=channels)) for channels in (False, True)}
#: Calls of a state space scan, as those of the delta rule.
SCAN = ssd_cases.Case(
    (130,),
    batch=2,
    heads=(1, 2),
    sizes=(64, 64),
    skip=0,
    gate=False,
    bias=False,
    initial=False,
    softplus=False,
    limit=(0.0, float("inf")),
)
SELECTIVE = SCAN._replace(
    lengths=(40,), heads=(1, 6), sizes=(1, 8), limit=(-ssd_cases.INF, ssd_cases.INF), selective=True
)


def conv(batch: int = 2, bias=None, initial_states=None, width: int = 4, **options):
    """Shares of the bounds that both passes take, of a batch or of a pack."""
    x, weight = leaf(drawn(batch, LENGTH, CHANNELS).mT), leaf(drawn(CHANNELS, width, seed=1))
    bias, states = (None if t is None else leaf(t) for t in (bias, initial_states))
    mains = {n: options[n].clone() for n in ("main_grad", "bias_main_grad") if n in options}
    out = call("causal_conv1d_fn", x, weight, bias, states, **options | mains)
    y, last = out if options.get("return_final_states") else (out, None)
    dy = drawn(batch, LENGTH, CHANNELS, seed=2).mT
    y.backward(dy)
    silu = options.get("activation") is not None
    inputs = [
        None if t is None else t.detach().double().requires_grad_()
        for t in (x, weight, bias, states)
    ]
    exact, terms, tails = reference(inputs, options.get("cu_seqlens"), silu)
    (exact * dy.double()[..., : exact.shape[2]]).sum().backward()
    sizes = [None if t is None else t.abs().detach().requires_grad_() for t in inputs]
    reference(sizes, options.get("cu_seqlens"), False)[0].backward(
        dy.double().abs()[..., : exact.shape[2]]
    )
    shares = {"y": share(y[..., : exact.shape[2]], exact, terms)}
    if last is not None:
        assert torch.equal(last, tails)
    got = x.grad, mains.get("main_grad", weight.grad), None, None
    names = ("dx", "dweight", "dbias", "dstates")
    got = [x.grad, mains.get("main_grad", weight.grad)]
    got += [None if bias is None else mains.get("bias_main_grad", bias.grad)]
    got += [None if states is None else states.grad]
    starts = None, options.get("main_grad"), options.get("bias_main_grad"), None
    for name, actual, leaf_, size, start in zip(names, got, inputs, sizes, starts, strict=True):
        if actual is not None:
            want = leaf_.grad if start is None else leaf_.grad + start
            # SiLU's slope is 1.1 at most.
            shares[name] = share(actual, want, size.grad * 1.2)
    return shares


def share(actual: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> float:
    """Largest error in parts of its bound."""
    bound = oracle.conv_bound(exact, terms, actual.dtype)
    return ((actual.double() - exact).abs() / bound).max().item()


def reference(inputs, offsets, silu: bool):
    """(rows, sums of the sizes of their terms, last inputs) by the oracle, sequence by sequence."""
    x, weight, bias, states = inputs
    if offsets is None:
        pieces = [
            (x[b : b + 1], None if states is None else states[b : b + 1]) for b in range(len(x))
        ]
    else:
        bounds = list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))
        pieces = [
            (x[..., first:end], None if states is None else states[s : s + 1])
            for s, (first, end) in enumerate(bounds)
        ]
    tail = weight.shape[1] - 1
    rows, sizes, tails = [], [], []
    for piece, state in pieces:
        state = piece.new_zeros(1, CHANNELS, tail) if state is None else state
        if piece.shape[2]:
            rows.append(oracle.conv(piece, weight, bias, state, silu))
            absolute = [None if t is None else t.abs() for t in (piece, weight, bias, state)]
            sizes.append(oracle.conv(*absolute, False).detach())
        tails.append(torch.cat([state, piece], 2)[..., -tail:])
    dim = 0 if offsets is None else 2
    return torch.cat(rows, dim), torch.cat(sizes, dim), torch.cat(tails).bfloat16()


def update(slots: torch.Tensor | None = None, bias=None, activation=None) -> dict[str, float]:
    """The next row of two sequences."""
    states, weight = drawn(3, CHANNELS, 5, seed=3), drawn(CHANNELS, 4, seed=1)
    x, chosen = drawn(2, CHANNELS, seed=4), torch.arange(2) if slots is None else slots
    before = states.clone()
    y = call("causal_conv1d_update", x, states, weight, bias, activation, conv_state_indices=slots)
    history = before[chosen][..., -3:]
    exact = oracle.conv(x[..., None], weight, bias, history, activation is not None)[..., 0]
    sizes = [None if t is None else t.abs() for t in (x[..., None], weight, bias, history)]
    terms = oracle.conv(*sizes, False)[..., 0]
    assert torch.equal(states[chosen], torch.cat([before[chosen], x[..., None]], 2)[..., 1:])
    return {"y": share(y, exact, terms)}


def delta(
    op: str, batch: int = 2, states=None, scale=None, offsets=None, norm: bool = False, gate=(),
    bound: float | None = None,
):  # fmt: skip
    """Shares of the bounds that both passes take; ``gate``: A_log, dt_bias and their main_grads."""
    case = DELTA._replace(batch=batch) if offsets is None else DELTA_PACK
    case = case._replace(channels=op.endswith("kda"))
    o, given = operands(case)._replace(initial=states), states is not None
    leaves = [None if t is None else leaf(t) for t in (*o, *gate[:2])]
    rows = [t.unflatten(0, (batch, -1)) for t in leaves[:5]]
    options = {"scale": scale, "initial_state": leaves[5], "cu_seqlens": offsets}
    mains = [t.clone() for t in gate[2:]]
    if gate:
        names = ("A_log", "dt_bias", "A_log_main_grad", "dt_bias_main_grad")
        options |= dict(zip(names, (*leaves[6:], *mains), strict=False), use_gate_in_kernel=True)
    if bound is not None:
        options["lower_bound"] = bound
    if norm:
        options["use_qk_l2norm_in_kernel"] = True
    results = call(op, *rows, **options, output_final_state=given)[: 1 + given]
    d_out, *d_last = upstream(case)[: 1 + given]
    torch.autograd.backward(results, [d_out.view(results[0].shape), *d_last])
    *wanted, exacts = exact(case, o, scale or case.sizes[0] ** -0.5, norm, gate[:2], bound)
    slopes = [t.double() for t in (d_out[: len(wanted[0])], *d_last)]
    torch.autograd.backward(wanted[: 1 + given], slopes)
    got = [results[0].flatten(0, 1), *results[1:]]
    grads = [None if t is None else t.grad for t in leaves]
    grads[6:] = [m - start for m, start in zip(mains, gate[2:], strict=True)] or grads[6:]
    got += [t for t in grads if t is not None]
    wanted = [*wanted[: 1 + given], *(t.grad for t in exacts if t is not None)]
    names = ["out", *["last"] * given, *(f"d{name}" for name in DeltaRule._fields[: 5 + given])]
    names += ["dA_log", "ddt_bias"]
    # Operands of products are bf16 on a GPU, and results of norms everywhere.
    entry = "kda" if case.channels else "gated_delta_rule"
    on_cpu = dispatch.backend(entry, d_out.device, BF16) == arch.CPU
    inside = 2.0**-22 if on_cpu and not norm else 2.0**-6
    shares = {}
    for name, actual, want in zip(names, got, wanted, strict=False):
        # Of sums of rows, whose terms are larger than they are.
        more = 2.0**3 if want.dim() == 1 else 1.0
        bound = oracle.delta_bound(want, actual.dtype, inside * more)
        error = (actual[: len(want)].double() - want[: len(actual)]).abs()
        shares[name] = (error / bound[: len(actual)]).max().item()
    return shares


def scan(of=SCAN, pack: bool = False, main_grads: bool = False, **changed):
    """Shares of the bounds that both passes take; ``changed``: fields of the case ``of``."""
    packed = {"lengths": (5, 0, of.lengths[0]), "batch": 0, "behind": 3} if pack else {}
    case = of._replace(**packed | changed)
    name, _, chunk = ssd_cases.SCANS[case.selective]
    o = ssd_cases.operands(case)
    leaves, others = ssd_cases.given(case, o)
    others |= {} if case.selective else {"chunk_size": chunk}
    summed = {n: leaves[n] for n in ssd_cases.SUMMED if n in leaves}
    mains = {f"{n}_main_grad": torch.zeros(t.shape) for n, t in summed.items() if main_grads}
    out, last = call(name, **ssd_cases.public(case, leaves | others | mains))
    d_out, d_last = ssd_cases.upstream(case)
    torch.autograd.backward([out, last], [ssd_cases.laid(case, d_out), d_last])
    *wanted, exacts = ssd_cases.exact(case, o)
    slopes = [d_out[: len(wanted[0])].double(), d_last.double()]
    torch.autograd.backward(wanted, slopes)
    got = {"out": ssd_cases.rows_in(case, out), "last": last}
    for n, t in leaves.items():
        grad = mains.get(f"{n}_main_grad", t.grad)
        rows = n in ssd_cases.ROWS
        got[f"d{n}"] = ssd_cases.rows_in(case, grad, n) if rows else grad
    want = dict(zip(["out", "last"], wanted, strict=False))
    want |= {
        f"d{n}": t.grad for n, t in zip(StateSpace._fields, exacts, strict=True) if t is not None
    }
    exact = case.selective or dispatch.backend("ssd_scan", d_out.device, BF16) == arch.CPU
    inside = 2.0**-22 if exact else 2.0**-6
    shares = {}
    for name, actual in got.items():
        # Those of sums over rows have a share of their largest term.
        more = 2.0**4 if name[1:] in ssd_cases.SUMMED else 1.0
        bound = oracle.delta_bound(want[name], actual.dtype, inside * more)
        error = (actual[: len(bound)].double() - want[name][: len(actual)]).abs()
        shares[name] = (error / bound[: len(actual)]).max().item()
    return shares


def gated_norm(weight=None, groups: int = 1, main_grad=None, **options) -> dict[str, float]:
    """Shares of the bounds that both passes take."""
    x, gate = (leaf(drawn(2, 3, CHANNELS, seed=s)) for s in (11, 12))
    weight, main = leaf(weight), None if main_grad is None else main_grad.clone()
    options |= {"group_size": CHANNELS // groups} if groups > 1 else {}
    options |= {} if main is None else {"main_grad": main}
    y = call("gated_rms_norm", x, weight, gate, **{"eps": 1e-5} | options)
    dy = drawn(2, 3, CHANNELS, seed=13)
    y.backward(dy)
    rule = GatedRule(
        {"swish": "silu"}.get(kind := options.get("activation", "silu"), kind),
        options.get("eps", 1e-5), options["norm_before_gate"], CHANNELS // groups,
    )  # fmt: skip
    rows = [t.detach().flatten(0, 1) for t in (x, gate, dy)]
    plain = None if weight is None else weight.detach()
    want = oracle.gated_norm(rows[0], plain, *rows[1:], rule)
    got = {"y": y, "dx": x.grad, "dgate": gate.grad}
    if weight is not None:
        assert (weight.grad is None) == (main is not None)
        got["dweight"] = weight.grad if main is None else main
        want["dweight"] = want["dweight"] + (0.0 if main is None else main_grad)
    return shares(got, want)


def mains(gate) -> dict[str, tuple]:
    """A gate with main_grads that are no zeros."""
    return {"gate": (*gate, *(drawn(len(t), seed=10, dtype=FP32) for t in gate))}


#: A delta rule -> its gate's parameters, and an option that the other has not.
RULES = ("gated_delta_rule", GATES[False], {}), ("kda", GATES[True], {"bound": -5.0})
PACK = {
    "batch": 1, "offsets": DELTA_PACK.offsets, "states": drawn(3, 2, 64, 64, seed=9, dtype=FP32),
}  # fmt: skip
BIAS, STATES = drawn(CHANNELS, seed=5), drawn(2, CHANNELS, 3, seed=6)
TABLE: dict[str, Cases] = {
    "causal_conv1d_fn": cases(
        conv,
        plain={},
        bias={"bias": BIAS},
        silu={"activation": "silu"},
        states={"initial_states": STATES, "return_final_states": True, "activation": "silu"},
        width={"width": 2, "activation": "swish"},
        pack={
            "batch": 1, "cu_seqlens": OFFSETS, "initial_states": drawn(3, CHANNELS, 3, seed=7),
            "bias": BIAS, "return_final_states": True, "activation": "silu",
        },
        main_grad={
            "bias": BIAS, "activation": "silu",
            "main_grad": drawn(CHANNELS, 4, seed=8, dtype=FP32),
            "bias_main_grad": drawn(CHANNELS, seed=9, dtype=FP32),
        },
    ),
    "causal_conv1d_update": cases(
        update,
        plain={},
        all={"slots": torch.tensor([2, 0]), "bias": BIAS, "activation": "silu"},
    ),
    **{
        f"chunk_{op}": cases(
            functools.partial(delta, f"chunk_{op}"),
            plain={},
            states={"states": drawn(2, 2, 64, 64, seed=8, dtype=FP32), "scale": 0.5},
            pack=PACK,
            norm={"norm": True},
            gate={"gate": gate},
            main_grads={"batch": 1, "offsets": DELTA_PACK.offsets, "norm": True, **mains(gate)},
            **({"bound": {"gate": gate, **bound}} if bound else {}),
        )
        for op, gate, bound in RULES
    },
    # The same ops by other names.
    **{
        f"fused_recurrent_{op}": cases(
            functools.partial(delta, f"fused_recurrent_{op}"),
            plain={},
            all={**PACK, "scale": 0.5, "norm": True, **mains(gate), **bound},
        )
        for op, gate, bound in RULES
    },
    "mamba_chunk_scan_combined": cases(
        scan,
        plain={},
        D={"skip": 1},
        gate={"gate": True},
        steps={"bias": True, "softplus": True, "limit": (0.02, 2.0)},
        pack={"pack": True, "initial": True},
        main_grads={"skip": 2, "bias": True, "main_grads": True},
        all={
            "pack": True, "initial": True, "skip": 1, "gate": True, "bias": True, "softplus": True,
            "limit": (0.02, 2.0), "main_grads": True,
        },
    ),
    "selective_scan": cases(
        functools.partial(scan, SELECTIVE),
        plain={},
        groups={"heads": (3, 6), "skip": 1, "gate": True},
        steps={"bias": True, "softplus": True},
        pack={"pack": True, "initial": True},
        main_grads={"skip": 1, "bias": True, "main_grads": True},
        all={
            "pack": True, "initial": True, "skip": 1, "gate": True, "bias": True, "softplus": True,
            "main_grads": True,
        },
    ),
    "gated_rms_norm": cases(
        gated_norm,
        plain={"norm_before_gate": True, "weight": drawn(CHANNELS, seed=14)},
        no_weight={"norm_before_gate": False},
        options={
            "norm_before_gate": False, "weight": drawn(CHANNELS, seed=14, dtype=FP32),
            "activation": "sigmoid", "eps": 0.1, "groups": 3,
        },
        swish={"norm_before_gate": True, "activation": "swish", "groups": 2},
        main_grad={
            "norm_before_gate": True, "weight": drawn(CHANNELS, seed=14),
            "main_grad": drawn(CHANNELS, seed=15, dtype=FP32),
        },
    ),
}  # fmt: skip
