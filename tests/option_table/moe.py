"""Cases of grouped products and of ck.moe."""

from __future__ import annotations

import torch

from cute_kernels.moe.tensors import Permutation
from tests.contract import same_bytes
from tests.mhc.cases import share
from tests.option_table.calls import call
from tests.option_table.rows import BF16, FP32, cases, drawn, leaf
from tests.oracles import gemm as products
from tests.oracles import moe as oracle
from tests.oracles.error_bounds import Near, exact
from tests.ranks import threads as threaded_ranks

E, N, K = 3, 24, 40
OFFSETS = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
#: Units of fp32's last place of the largest term that a result of routing may be off.
UNITS = 64


def grouped_linear(bias=None, main_grad=None, order="chain") -> dict[str, float]:
    x, weight = leaf(drawn(12, K, seed=1)), leaf(drawn(E, N, K, seed=2))
    bias = leaf(bias)
    start = None if main_grad is None else main_grad.clone()
    y = call("grouped_linear", x, weight, OFFSETS, bias, main_grad=start, order=order)
    dy = drawn(*y.shape, seed=3)
    y.backward(dy)
    shares = dict.fromkeys(("y", "dx", "dweight"), 0.0)
    for expert, rows in oracle.experts(OFFSETS):
        if rows.start == rows.stop:
            untouched = main_grad[expert] if main_grad is not None else torch.zeros(N, K)
            of_weight = weight.grad[expert].float() if start is None else start[expert]
            assert same_bytes(of_weight, untouched)
            continue
        one, w, upstream = x.detach()[rows], weight.detach()[expert], dy[rows]
        bias_e = None if bias is None else bias.detach()[expert]
        before = None if main_grad is None else main_grad[expert]
        grad = weight.grad[expert] if start is None else start[expert]
        for name, got, factors, more in (
            ("y", y.detach()[rows], (one, w), {"bias": bias_e}),
            ("dx", x.grad[rows], (upstream, w.mT), {}),
            ("dweight", grad, (upstream.mT, one.mT), {"accumulator": before}),
        ):
            bound = products.error_bound(*factors) * (1 + 2.0**-7)
            if more.get("accumulator") is not None:
                bound = bound + 2.0**-20 * before.double().abs()
            value = Near(products.gemm(*factors, **more), bound).rounded()
            shares[name] = max(shares[name], share(got, value))
        if bias is not None:
            value = exact(upstream).sum(0, chain=6)
            shares["dbias"] = max(shares.get("dbias", 0.0), share(bias.grad[expert], value))
    return shares


def _share(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor | None = None) -> float:
    """The error in parts of `UNITS` of the last place of ``size``, or of the value."""
    size = want.abs() if size is None else size
    unit = size.amax() * torch.finfo(got.dtype).eps / 2
    return ((got.double() - want).abs().amax() / (UNITS * unit)).item()


LOGITS = drawn(9, 8, seed=5)
BIAS = drawn(8, seed=6, dtype=FP32)


def route(k: int = 3, **options) -> dict[str, float]:
    logits = leaf(LOGITS)
    got = call("moe.route", logits, k, **options)
    score = options.get("score", "softmax")
    of = {"softmax": lambda t: t.softmax(-1), "sigmoid": torch.sigmoid}[score]
    wide = LOGITS.double().requires_grad_()
    scores = of(wide)
    groups = options.get("groups", 1)
    kept, bias = options.get("topk_groups", 1), options.get("bias")
    if "indices" not in options:
        want = oracle.choice(got.scores.detach(), bias, k, groups, kept)
        assert got.indices.tolist() == want
    weights = scores.gather(1, got.indices.long())
    if options.get("normalize", True):
        weights = weights / weights.sum(1, keepdim=True)
    weights = weights * options.get("scale", 1.0)
    upstream = drawn(9, k, seed=7, dtype=FP32)
    (grad,) = torch.autograd.grad(got.weights, logits, upstream)
    (want_grad,) = torch.autograd.grad(weights, wide, upstream.double())
    return {
        "weights": _share(got.weights.detach(), weights.detach()),
        "scores": _share(got.scores.detach(), scores.detach()),
        "dlogits": _share(grad, want_grad),
    }


INDICES = torch.tensor([[0, 3], [1, 2], [3, 3], [2, 0]], dtype=torch.int32)


def permute() -> dict[str, float]:
    x = leaf(drawn(4, 16, seed=1))
    rows, permutation = call("moe.permute", x, INDICES, 4)
    want = oracle.permutation(INDICES, 4)
    assert all(map(same_bytes, permutation, want))
    assert same_bytes(rows.detach(), x.detach()[permutation.order.long() // 2])
    dy = drawn(8, 16, seed=2)
    rows.backward(dy)
    return {"dx": _share(x.grad, oracle.combine(dy.double(), None, want[2]))}


def combine(weights: torch.Tensor | None) -> dict[str, float]:
    offsets, order, positions = oracle.permutation(INDICES, 4)
    rows, weights = leaf(drawn(8, 16, seed=1)), leaf(weights)
    permutation = Permutation(offsets, order, positions)
    y = call("moe.combine", rows, weights, permutation)
    dy = drawn(4, 16, seed=2)
    y.backward(dy)
    by = torch.ones(4, 2) if weights is None else weights.detach()
    wide, by = rows.detach().double().requires_grad_(), by.double().requires_grad_()
    value = (wide[positions.long()] * by[..., None]).sum(1)
    value.backward(dy.double())
    shares = {"y": _share(y.detach(), value.detach()), "drows": _share(rows.grad, wide.grad)}
    return shares if weights is None else shares | {"dweights": _share(weights.grad, by.grad)}


def dispatch(**options) -> dict[str, float]:
    """Two ranks that are threads, of which one has one token: rows there, and dx."""
    x, dy = drawn(4, 16, seed=1), drawn(4, 16, seed=2)
    offsets, order, _ = oracle.permutation(INDICES, 4)
    tokens, experts = (slice(0, 3), slice(3, 4)), (slice(0, 2), slice(2, 4))

    def work(rank):
        span = tokens[rank.rank()]
        own = leaf(x[span])
        rows, dispatched = call("moe.dispatch", own, INDICES[span], 4, group=rank, **options)
        first, last = experts[rank.rank()].start, experts[rank.rank()].stop
        begin, end = offsets[first], offsets[last]
        assert same_bytes(dispatched.offsets, offsets[first : last + 1] - begin)
        assert same_bytes(rows.detach(), x[order[begin:end].long() // 2])
        y = call("moe.combine", rows, None, dispatched)
        y.backward(dy[span])
        return y.detach(), own.grad

    with threaded_ranks.group_of_threads():
        y, dx = map(torch.cat, zip(*threaded_ranks.together(2, work), strict=True))
    # Two copies of a row, and two of its gradient.
    return {"y": _share(y, 2 * x.double()), "dx": _share(dx, 2 * dy.double())}


def load_balance_loss() -> dict[str, float]:
    scores = leaf(LOGITS.float().softmax(-1))
    indices = scores.detach().topk(2).indices
    loss = call("moe.load_balance_loss", scores, indices)
    loss.backward()
    wide = scores.detach().double().requires_grad_()
    share_of = torch.nn.functional.one_hot(indices, 8).double().sum((0, 1)) / 9
    want = 8 * (share_of * wide.mean(0)).sum()
    want.backward()
    return {"loss": _share(loss.detach(), want.detach()), "dscores": _share(scores.grad, wide.grad)}


def z_loss() -> dict[str, float]:
    logits = leaf(LOGITS)
    loss = call("moe.z_loss", logits)
    loss.backward()
    wide = LOGITS.double().requires_grad_()
    want = wide.logsumexp(-1).square().mean()
    want.backward()
    return {"loss": _share(loss.detach(), want.detach()), "dlogits": _share(logits.grad, wide.grad)}


TABLE = {
    "grouped_linear": cases(
        grouped_linear,
        plain={},
        bias={"bias": drawn(E, N, seed=4)},
        main_grad={"main_grad": drawn(E, N, K, seed=8, dtype=FP32)},
        tree={"order": "tree"},
    ),
    "moe.route": cases(
        route,
        plain={},
        sigmoid={"score": "sigmoid", "bias": BIAS, "scale": 2.5},
        groups={"groups": 4, "topk_groups": 2},
        biased_groups={"groups": 2, "topk_groups": 1, "bias": BIAS.to(BF16)},
        replay={"indices": torch.arange(27).view(9, 3) % 8, "normalize": False},
    ),
    "moe.permute": cases(permute, plain={}),
    "moe.combine": cases(
        combine,
        plain={"weights": None},
        weights={"weights": drawn(4, 2, seed=3, dtype=FP32)},
        narrow={"weights": drawn(4, 2, seed=3)},
    ),
    "moe.dispatch": cases(dispatch, shards={}, unverified_shards={"verify": False}),
    "moe.load_balance_loss": cases(load_balance_loss, plain={}),
    "moe.z_loss": cases(z_loss, plain={}),
}
