"""Cases of products, linear_logp, norms and rowwise ops."""

from __future__ import annotations

import functools
import math
from unittest import mock

import torch

from cute_kernels.norm.config import LAYER, RMS
from cute_kernels.norm.tensors import Rule, Scale, Upstream
from cute_kernels.runtime import process_groups
from tests.contract import half_ulp
from tests.logp import cases as logp_cases
from tests.mhc.cases import share
from tests.option_table.calls import call
from tests.oracles import gemm as products
from tests.oracles import logp as logps
from tests.oracles import norm as norms
from tests.oracles import rowwise
from tests.oracles.error_bounds import Near, U, exact
from tests.ranks import threads as threaded_ranks
from tests.rowwise.triton_cases import ULPS
from tests.runtime.cached_calls import drawn

BF16, FP32 = torch.bfloat16, torch.float32


def leaf(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.clone().requires_grad_()


def cases(run, **named: dict) -> dict:
    """``run`` with each of the options."""
    return {label: functools.partial(run, **options) for label, options in named.items()}


# ---- products ------------------------------------------------------------------------------------

N, K = 24, 40


def _product(a, b, order: str, bias=None, start=None) -> Near:
    """a [M, K] · b [N, K]ᵀ + bias + start, all of it in one sum."""
    bound = products.error_bound if order == "chain" else products.tree_error_bound
    value, error = products.gemm(a, b, bias, start), bound(a, b) * (1 + 2.0**-7)
    if start is not None:
        error = error + 5.25 * math.ceil(a.shape[1] / 16) * 2.0**-23 * start.double().abs()
    return Near(value, error).rounded()


def product(op: str, bias=None, main_grad=None, **options) -> dict[str, float]:
    x = leaf(drawn(6, K, seed=1) if op == "matmul" else drawn(2, 3, K, seed=1))
    weight, bias = leaf(drawn(N, K, seed=2)), leaf(bias)
    start = None if main_grad is None else main_grad.clone()
    order = "tree" if op == "skinny_linear" else options.get("order", "chain")
    if start is not None:
        options["main_grad"] = start
    if op == "matmul":
        y = call(op, x, weight.mT, **options)
    else:
        y = call(op, x, weight, bias, **options)
    dy = drawn(*y.shape, seed=3)
    y.backward(dy)
    rows, flat, w = x.detach().flatten(0, -2), dy.flatten(0, -2), weight.detach()
    got = {"y": y, "dx": x.grad, "dweight": weight.grad if start is None else start}
    want = {
        "y": _product(rows, w, order, bias),
        "dx": _product(flat, w.mT, order),
        "dweight": _product(flat.mT, rows.mT, "chain", start=main_grad),
    }
    assert start is None or weight.grad is None
    if bias is not None:
        got["dbias"] = bias.grad
        want["dbias"] = exact(flat).sum(0, chain=6) if bias.dim() == 1 else exact(flat)
    return {name: share(got[name], want[name]) for name in got}


OF_COLUMNS, OF_ROWS = drawn(N, seed=4), drawn(6, N, seed=5)
MAIN_GRAD = drawn(N, K, seed=6, dtype=FP32)

# ---- linear_logp ---------------------------------------------------------------------------------

T, D, V, ENTRIES = 5, 40, 48, 43
TEMPERATURES = drawn(T, seed=14, dtype=FP32).exp()


def _tokens(ignore_index: int) -> torch.Tensor:
    target = torch.randint(8, ENTRIES, (T,), generator=torch.Generator().manual_seed(13))
    target[1] = ignore_index
    return target


def _exact_logp(hidden, weight, bias, target, upstream, options: logps.Options):
    """(values by name, bounds by name): log p, entropy and gradients."""
    kept = (target != options.ignore_index)[:, None]
    tensors = torch.where(kept, hidden, 0.0), weight, bias
    values = logps.linear_logp(tensors[0], weight, target, bias, options)
    values += logps.gradients(tensors, target, upstream, options)
    return logp_cases.Results(*values), logps.error_bounds(tensors, target, upstream, options)


def linear_logp(bias=None, main_grad=None, **options) -> dict[str, float]:
    hidden, weight, bias = leaf(drawn(T, D, seed=11)), leaf(drawn(V, D, seed=12)), leaf(bias)
    start = None if main_grad is None else main_grad.clone()
    if start is not None:
        options["main_grad"] = start
    target, upstream = _tokens(options.get("ignore_index", -100)), _upstream(options)
    out = call("linear_logp", hidden, weight, target, bias, **options)
    logp, entropy = out if isinstance(out, tuple) else (out, None)
    torch.autograd.backward(
        [t for t in (logp, entropy) if t is not None], upstream[: _results(out)]
    )
    names = set(logps.Options._fields) & options.keys()
    arguments = logps.Options(**{name: options[name] for name in names})
    plain = [None if t is None else t.detach() for t in (hidden, weight, bias)]
    want, bounds = _exact_logp(*plain, target, upstream, arguments)
    d_weight = weight.grad
    if start is not None:
        assert weight.grad is None
        d_weight, chain = start, 5.25 * math.ceil(T / 16) * 2.0**-23
        want = want._replace(weight=want.weight + main_grad.double())
        bounds = bounds._replace(weight=bounds.weight + chain * main_grad.double().abs())
    d_bias = None if bias is None else bias.grad
    got = logp_cases.Results(logp, entropy, hidden.grad, d_weight, d_bias)
    return logp_cases.shares(got, want, bounds)


def _results(made) -> int:
    return len(made) if isinstance(made, tuple) else 1


def _upstream(options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of log p and of the entropy, zeros where it is not asked for."""
    d_logp, d_entropy = drawn(T, seed=15, dtype=FP32), drawn(T, seed=16, dtype=FP32)
    return d_logp, d_entropy if options.get("return_entropy") else torch.zeros(T)


def log_probs(**options) -> dict[str, float]:
    logits = leaf(drawn(T, V, seed=17))
    target, upstream = _tokens(options.get("ignore_index", -100)), _upstream(options)
    out = call("log_probs", logits, target, **options)
    logp, entropy = out if isinstance(out, tuple) else (out, None)
    torch.autograd.backward(
        [t for t in (logp, entropy) if t is not None], upstream[: _results(out)]
    )
    names = set(logps.Options._fields) & options.keys()
    arguments = logps.Options(**{name: options[name] for name in names})
    # Logits are the product of themselves and the identity.
    own = torch.eye(V, dtype=logits.dtype)
    want, bounds = _exact_logp(logits.detach(), own, None, target, upstream, arguments)
    got = logp_cases.Results(logp, entropy, logits.grad, None, None)
    return logp_cases.shares(got, want, bounds)


def shards(rows: int = V, **options) -> dict[str, float]:
    """The vocabulary cut after 32 of the head's rows, by ranks that are threads."""
    whole, bias = drawn(rows, D, seed=12), drawn(rows, seed=18)
    hidden, target, upstream = drawn(T, D, seed=11), _tokens(-100), _upstream({"return_entropy": 1})
    first = 32

    def work(rank):
        own = slice(first, None) if rank.rank() else slice(0, first)
        leaves = [leaf(t) for t in (hidden, whole[own], bias[own])]
        place = {"group": rank, "vocab_start": own.start, "vocab_size": ENTRIES, "order": "tree"}
        others = {"bias": leaves[2], "return_entropy": True, **options}
        made = call("linear_logp", leaves[0], leaves[1], target, **others, **place)
        torch.autograd.backward(made, upstream)
        return [t.detach() for t in made] + [t.grad for t in leaves]

    team = torch.get_num_threads()
    with (
        mock.patch.object(process_groups, "_all_gather", threaded_ranks.all_gather),
        mock.patch.object(process_groups, "group_of", lambda value, name: value),
        mock.patch.object(process_groups, "devices", lambda group: ["cpu"]),
    ):
        ranks = threaded_ranks.together(2, work)
    torch.set_num_threads(team)
    options = logps.Options(vocab_size=ENTRIES, order="tree")
    want, bounds = _exact_logp(hidden, whole, bias, target, upstream, options)
    joined = [torch.cat([out[i] for out in ranks]) for i in (3, 4)]
    out = [logp_cases.Results(*rank[:3], *joined) for rank in ranks]
    shares = [logp_cases.shares(got, want, bounds) for got in out]
    return {f"{name} of rank {i}": s for i, of in enumerate(shares) for name, s in of.items()}


# ---- norms ---------------------------------------------------------------------------------------

WIDTH = 72


def norm(op: str, weight, bias=None, residual=None, main_grad=None, bias_main_grad=None, **options):
    x, weight, bias, residual = (
        leaf(t) for t in (drawn(2, 3, WIDTH, seed=21), weight, bias, residual)
    )
    mains = {"main_grad": main_grad, "bias_main_grad": bias_main_grad}
    mains = {name: t.clone() for name, t in mains.items() if t is not None}
    others = options | mains | ({"residual": residual} if residual is not None else {})
    operands = (x, weight) if op == "rms_norm" else (x, weight, bias)
    out = call(op, *operands, **others)
    y, h = out if residual is not None else (out, None)
    dy, dh = drawn(2, 3, WIDTH, seed=22), drawn(2, 3, WIDTH, seed=23)
    torch.autograd.backward([y] if h is None else [y, h], [dy] if h is None else [dy, dh])
    rule = Rule(
        RMS if op == "rms_norm" else LAYER,
        options.get("eps", 1e-6 if op == "rms_norm" else 1e-5),
        options.get("offset", 0.0),
    )
    rows, flat = x.detach().flatten(0, 1), dy.flatten(0, 1)
    if residual is not None:
        rows = (rows.double() + residual.detach().flatten(0, 1).double()).to(BF16)
        assert torch.equal(h.flatten(0, 1), rows)
    scale = Scale(*(None if t is None else t.detach() for t in (weight, bias)))
    up = Upstream(flat, None if h is None else dh.flatten(0, 1))
    d_h, d_weight, d_bias = norms.backward(up, rows, scale, rule)
    want = {"y": norms.forward(rows, scale, rule)[0], "dx": d_h, "dresidual": d_h}
    got = {"y": y, "dx": x.grad, "dresidual": None if residual is None else residual.grad}
    for name, t, grad, main, start in (
        ("dweight", weight, d_weight, mains.get("main_grad"), main_grad),
        ("dbias", bias, d_bias, mains.get("bias_main_grad"), bias_main_grad),
    ):
        if t is not None:
            assert (t.grad is None) == (main is not None)
            got[name] = t.grad if main is None else main
            want[name] = grad if main is None else grad + start
    return {name: share(t, want[name]) for name, t in got.items() if t is not None}


def vector(seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (1 + 0.3 * drawn(WIDTH, seed=seed, dtype=FP32)).to(dtype)


OF_NORM, RESIDUAL = drawn(WIDTH, seed=24, dtype=FP32), drawn(2, 3, WIDTH, seed=25)

# ---- rowwise -------------------------------------------------------------------------------------


def of_fp32(value: torch.Tensor, terms=0.0, ulps=ULPS) -> Near:
    """Bound of units of fp32 in the last place of a value and of the terms of its sum."""
    return Near(value, half_ulp(2.0**-126 + value.abs() + terms, FP32) * ulps)


def embedding(main_grad=None, **options) -> dict[str, float]:
    ids = torch.tensor([[3, 1, 4, 1, 5], [2, 6, 5, 3, 5]])
    weight, start = leaf(drawn(7, 20, seed=31)), None if main_grad is None else main_grad.clone()
    if start is not None:
        options["main_grad"] = start
    y = call("embedding", ids, weight, **options)
    dy = drawn(*y.shape, seed=32)
    y.backward(dy)
    assert torch.equal(y, weight[ids])
    padding = options.get("padding_idx")
    counted = ids != (padding % 7 if padding is not None else -1)
    terms = torch.zeros(7, 10, 20, dtype=torch.float64)
    index = torch.arange(10)[counted.flatten()]
    terms[ids.flatten()[index], index] = dy.flatten(0, 1)[index].double()
    want = exact(terms).sum(1, chain=10)
    want = want if start is None else want + main_grad
    assert start is None or weight.grad is None
    return {"dweight": share(weight.grad if start is None else start, want)}


def softmax(op: str, **options) -> dict[str, float]:
    x = leaf(drawn(3, 70, seed=33) * 3)
    y = call(op, x, **options)
    assert y.dtype == options.get("dtype", BF16)
    dy = drawn(3, 70, seed=34).to(y.dtype)
    y.backward(dy)
    of, size = x.detach().double(), x.detach().double().abs().amax() * 2 + 8
    terms = dy.double().abs().sum(1, keepdim=True)
    if op == "softmax":
        value = of_fp32(of.softmax(1), ulps=ULPS * size)
        slope = of_fp32(rowwise.softmax_gradient(dy, y.detach()), terms)
    else:
        value = of_fp32(of.log_softmax(1), size)
        slope = of_fp32(rowwise.log_softmax_gradient(dy, of), terms * size)
    return {"y": share(y, value), "dx": share(x.grad, slope)}


def activation(op: str, **options) -> dict[str, float]:
    kind = op.removesuffix("_mul")
    kind = "gelu_tanh" if options.get("approximate") == "tanh" else kind
    gated = op.endswith("_mul")
    operands = [leaf(drawn(3, 70, seed=35 + i)) for i in range(1 + gated)]
    y = call(op, *operands, **options)
    dy = drawn(3, 70, seed=37)
    y.backward(dy)
    x, dy = operands[0].detach().double(), dy.double()
    up = operands[1].detach().double() if gated else torch.ones_like(x)
    far = ULPS * {"gelu_tanh": 8.0, "gelu": 2.0}.get(kind, 1.0)
    value, slope = rowwise.value(kind, x), rowwise.slope(kind, x)
    terms = (1 + x.abs()) * dy.abs() * up.abs()
    out = {
        "y": share(y, of_fp32(value * up, ulps=far)),
        "dx": share(operands[0].grad, of_fp32(slope * dy * up, terms)),
    }
    return out | ({"dup": share(operands[1].grad, of_fp32(value * dy, ulps=far))} if gated else {})


def rotary_table(**options) -> dict[str, float]:
    positions, inverse = (
        torch.tensor([[0, 1, 77], [4095, 5, 131072]]),
        10000.0 ** -torch.linspace(0, 1, 6),
    )
    out = call("rotary_table", positions, inverse, **options)
    angle = (positions[..., None].double() * inverse.double()).float().double()
    angle = torch.cat([angle, angle], -1)
    assert {t.dtype for t in out} == {options.get("dtype", FP32)}
    scaling = options.get("scaling", 1.0)
    exact_ones = (scaling * angle.cos(), scaling * angle.sin())
    want = [Near(t, torch.full_like(t, 2.0**-48)) for t in exact_ones]
    return {name: share(got, w) for name, got, w in zip(("cos", "sin"), out, want, strict=True)}


#: unsqueeze_dim -> the shapes of q and k, for 5 positions.
_ROTARY = {
    1: ((2, 3, 5, 20), (2, 1, 5, 20)),
    2: ((2, 5, 3, 20), (2, 5, 1, 20)),
    0: ((3, 5, 20),) * 2,
}


def rotary_pair(op: str, tables: torch.dtype = FP32, **options) -> dict[str, float]:
    dim = options.get("unsqueeze_dim", 1)
    q, k = (leaf(drawn(*shape, seed=41 + i)) for i, shape in enumerate(_ROTARY[dim]))
    shape = (5, 12) if dim == 0 else (2, 5, 12)
    cos, sin = (drawn(*shape, seed=s, dtype=tables) for s in (43, 44))
    made = call(op, q, k, cos, sin, **options)
    up = [drawn(*t.shape, seed=45 + i, dtype=t.dtype) for i, t in enumerate(made)]
    torch.autograd.backward(made, up)
    wide = [t.unsqueeze(dim) for t in (cos, sin)]
    found = {}
    for name, x, y, dy in zip("qk", (q, k), made, up, strict=True):
        of = x.detach().double().requires_grad_()
        value = rowwise.rotary(of, *wide)
        (slope,) = torch.autograd.grad(value, of, dy.double())
        size = 2 * max(float(t.abs().max()) for t in wide)
        for label, got, want, largest in ((name, y, value, of), (f"d{name}", x.grad, slope, dy)):
            # Of apply_rotary_pos_emb two products and a sum have the dtype of x and the tables; of
            # its gradient, that of x.
            in_steps = op != "apply_rotary" and (tables == BF16 or label != name)
            unit = 2.0**-8 if in_steps else U
            error = torch.full_like(want, 3 * unit * size * float(largest.detach().abs().max()))
            found[label] = share(got, Near(want.detach(), error.detach()))
    return found


def clip(single: bool = False, error_if_nonfinite=False, main_grad=False, norm_type=2.0) -> dict:
    parameters = [torch.nn.Parameter(drawn(*shape, seed=51)) for shape in ((7, 9), (300,))]
    parameters = parameters[:1] if single else parameters
    for i, p in enumerate(parameters):
        if main_grad:
            p.main_grad = drawn(*p.shape, seed=55 + i, dtype=FP32)
        else:
            p.grad = drawn(*p.shape, seed=52 + i)
    taken = [p.main_grad if main_grad else p.grad for p in parameters]
    before = [t.clone() for t in taken]
    options = {"norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
    options["main_grad"] = main_grad
    total = call("clip_grad_norm_", parameters[0] if single else parameters, 0.75, **options)
    flat = torch.cat([t.flatten().double() for t in before])
    norm = torch.linalg.vector_norm(flat, norm_type)
    found = {"norm": share(total, of_fp32(norm, ulps=1))}
    factor = (0.75 / (norm + 1e-6)).clamp(max=1)
    for i, (got, was) in enumerate(zip(taken, before, strict=True)):
        found[str(i)] = share(got, of_fp32(was.double() * factor, ulps=3))
    return found


def _of(function, op: str):
    return functools.partial(function, op)


TABLE = {
    "linear": cases(
        _of(product, "linear"),
        plain={},
        bias={"bias": OF_COLUMNS},
        main_grad={"main_grad": MAIN_GRAD},
        tree={"order": "tree", "bias": OF_COLUMNS, "main_grad": MAIN_GRAD},
    ),
    "matmul": cases(_of(product, "matmul"), plain={}, tree={"order": "tree"}),
    "skinny_linear": cases(
        _of(product, "skinny_linear"),
        plain={},
        ordered={"deterministic": True, "bias": OF_COLUMNS},
        unordered={"deterministic": False, "bias": OF_ROWS},
    ),
    "linear_logp": {
        **cases(
            linear_logp,
            plain={},
            bias={"bias": drawn(V, seed=18)},
            order={"order": "tree"},
            temperature={"temperature": 0.7},
            temperatures={"temperature": TEMPERATURES},
            softcap={"softcap": 3.0},
            largest_cap={"softcap": 1024.0},
            ignore_index={"ignore_index": 7},
            entropy={"return_entropy": True},
            vocab_size={"vocab_size": ENTRIES},
            main_grad={"main_grad": drawn(V, D, seed=19, dtype=FP32)},
            logits_memory={"logits_memory": 3 * 4 * V},
            all={
                "bias": drawn(V, seed=18),
                "order": "tree",
                "temperature": TEMPERATURES,
                "softcap": 3.0,
                "ignore_index": 7,
                "return_entropy": True,
                "vocab_size": ENTRIES,
                "main_grad": drawn(V, D, seed=19, dtype=FP32),
                "logits_memory": 2 * 4 * V,
            },
        ),
        "shards": shards,
        "unverified_shards": functools.partial(shards, rows=64, verify=False),
    },
    "log_probs": cases(
        log_probs,
        plain={},
        temperature={"temperature": 0.7},
        softcap={"softcap": 3.0},
        largest_cap={"softcap": 1024.0},
        ignore_index={"ignore_index": 7},
        entropy={"return_entropy": True},
        vocab_size={"vocab_size": ENTRIES},
        all={
            "temperature": TEMPERATURES,
            "softcap": 3.0,
            "ignore_index": 7,
            "return_entropy": True,
            "vocab_size": ENTRIES,
        },
    ),
    "rms_norm": cases(
        _of(norm, "rms_norm"),
        plain={"weight": vector(26)},
        eps={"weight": vector(26), "eps": 0.3},
        none={"weight": None},
        offset={"weight": None, "offset": 1.0},
        residual={"weight": vector(26), "residual": RESIDUAL},
        fp32={"weight": vector(26, FP32), "offset": 0.5},
        all={
            "weight": vector(26),
            "eps": 0.3,
            "offset": 1.0,
            "residual": RESIDUAL,
            "main_grad": OF_NORM,
        },
    ),
    "layer_norm": cases(
        _of(norm, "layer_norm"),
        plain={"weight": vector(26), "bias": vector(27)},
        none={"weight": None},
        weight={"weight": vector(26)},
        bias={"weight": None, "bias": vector(27)},
        eps={"weight": vector(26), "bias": vector(27), "eps": 0.3},
        mixed={"weight": vector(26), "bias": vector(27, FP32)},
        main_grad={"weight": vector(26), "bias": vector(27), "main_grad": OF_NORM},
        bias_main_grad={"weight": vector(26), "bias": vector(27), "bias_main_grad": OF_NORM},
        all={
            "weight": vector(26),
            "bias": vector(27),
            "eps": 0.3,
            "residual": RESIDUAL,
            "main_grad": OF_NORM,
            "bias_main_grad": OF_NORM + 1,
        },
    ),
    "embedding": cases(
        embedding,
        plain={},
        padding_idx={"padding_idx": 5},
        from_the_end={"padding_idx": -2},
        main_grad={"main_grad": drawn(7, 20, seed=38, dtype=FP32)},
    ),
    **{
        op: cases(_of(softmax, op), plain={}, dtype={"dtype": FP32}, dim={"dim": 1})
        for op in ("softmax", "log_softmax")
    },
    **{op: cases(_of(activation, op), plain={}) for op in ("silu", "sigmoid", "tanh", "silu_mul")},
    **{
        op: cases(_of(activation, op), plain={}, approximate={"approximate": "tanh"})
        for op in ("gelu", "gelu_mul")
    },
    "rotary_table": cases(
        rotary_table, plain={}, scaling={"scaling": 1.25}, dtype={"dtype": BF16, "scaling": 0.8}
    ),
    "apply_rotary": cases(
        _of(rotary_pair, "apply_rotary"),
        plain={},
        positions_first={"unsqueeze_dim": 2},
        no_batch={"unsqueeze_dim": 0},
    ),
    "apply_rotary_pos_emb": cases(
        _of(rotary_pair, "apply_rotary_pos_emb"),
        plain={"tables": BF16},
        positions_first={"unsqueeze_dim": 2, "tables": BF16},
        fp32={},
        dtype={"dtype": BF16},
    ),
    "clip_grad_norm_": cases(
        clip,
        plain={},
        single={"single": True},
        largest={"norm_type": math.inf},
        main_grad={"main_grad": True},
        finite={"error_if_nonfinite": True},
    ),
}
