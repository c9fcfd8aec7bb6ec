"""Every covered op is ours in the mode, torch's out of it; a hole in the table is noticed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels.model.aten import COVERED, REFUSED
from cute_kernels.model.batch_invariant.ops import definitions as ops
from cute_kernels.runtime import torch_ops
from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn.config import VALUE_DIMS
from tests import contract
from tests.contract import ContractViolation, same_bytes
from tests.model.batch_invariant.cases import (
    BF16,
    CASES,
    FP32,
    ON_GPUS,
    drawn,
    inside,
    installed,
    row_op,
)
from tests.watchers import Seen

#: Aten's composites: what they are made of is seen below them.
PARTS = {
    "linear": {"addmm", "mm", "bmm", "add.Tensor", "add_.Tensor"},
    "layer_norm": {"native_layer_norm"},
    "rms_norm": {"_fused_rms_norm", "mean.dim", "mul.Tensor"},
    "_fused_rms_norm": {"mean.dim", "mul.Tensor"},
    "scaled_dot_product_attention": {"_scaled_dot_product_flash_attention_for_cpu", "bmm"},
}


#: Overrides that only save time: what they are made of in torch is covered.
BACKED = {"layer_norm": "native_layer_norm"}


def below(name: str, on: bool) -> set[str]:
    """The ops that a case reaches."""
    op = row_op(name, FP32 if name == "softmax's gradient" else BF16)
    rows = op.rows(5, 3)
    with Seen() as seen:
        if on:
            inside(CASES[name].call, rows)
        else:
            CASES[name].call(rows)
    return {name.removeprefix("aten::") for name in seen.names}


def require_ours(name: str) -> None:
    """That a case's covered ops do not reach torch."""
    reached = below(name, True)
    assert any(op.startswith("cute_kernels::") for op in reached), reached
    wrong = reached & {CASES[name].op, *PARTS.get(CASES[name].op, ())}
    assert not wrong, wrong


@pytest.mark.parametrize("name", list(CASES))
def test_ours_in_the_mode_and_torchs_out_of_it(name):
    require_ours(name)
    if name == ON_GPUS:
        return
    reached = below(name, False)
    assert not any(op.startswith("cute_kernels::") for op in reached)
    assert reached & {CASES[name].op, *PARTS.get(CASES[name].op, ())}


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row.op)
def test_an_override_left_out_is_noticed(row):
    gone = {row.op, BACKED.get(row.op)}
    rest = tuple(other for other in COVERED if other.op not in gone)
    names = [name for name, case in CASES.items() if row.op == case.op]

    def check() -> None:
        for name in names:
            require_ours(name)

    check()
    # RuntimeError: what torch's own kernel says, or strict.
    with installed(rest, REFUSED), pytest.raises((AssertionError, RuntimeError)):
        check()
    check()


# ---- mutants of what stands in -------------------------------------------------------------------


def lanes_by_rows(x, divisor, dtype):
    """Lanes by the number of rows, as torch's reduction on a GPU has them."""
    rows = x.shape[:-1].numel()
    lanes = 512 // min(16, 1 << max(0, rows.bit_length() - 1))
    wide = F.pad(x.float(), (0, -x.shape[-1] % lanes))
    total = torch.zeros(*x.shape[:-1], lanes)
    for part in wide.split(lanes, -1):
        total = total + part
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return (total.squeeze(-1) / divisor).to(dtype)


def test_a_sum_by_rows_is_noticed(monkeypatch):
    op = row_op("mean", FP32)
    assert contract.check_population(op, 67, 7, [1, 2, 3, 9, 33])
    monkeypatch.setattr("cute_kernels.model.batch_invariant.ops.rows.row_sum", lanes_by_rows)
    with pytest.raises(ContractViolation):
        contract.check_population(op, 67, 7, [1, 2, 3, 9, 33])


def test_a_product_by_its_place_in_the_batch_is_noticed(monkeypatch):
    def shifted(a, b, base, beta, alpha):
        products = [ops.batched_product(a[i : i + 1], b[i : i + 1], base, beta, alpha)
                for i in range(len(a))]  # fmt: skip
        if len(products) > 4:  # another order for the last of a large batch
            products[-1] = (a[-1:].flip(-1).float() @ b[-1:].flip(-2).float()).to(a.dtype)
        return torch.cat(products)

    op = row_op("bmm", FP32)
    assert contract.check_population(op, 20, 7, [1, 3, 20])
    monkeypatch.setattr("cute_kernels.model.batch_invariant.ops.products.batched_product", shifted)
    with pytest.raises(ContractViolation):
        contract.check_population(op, 20, 7, [5, 20])


# ---- ours inside ---------------------------------------------------------------------------------


def ours() -> list[torch.Tensor]:
    """Results and gradients of ops of ours that call ops of torch inside."""
    x, weight = drawn(33, 64, dtype=BF16), drawn(24, 64, seed=2, dtype=BF16)
    ids, target = torch.arange(33) % 7, torch.arange(33) % 24
    calls = [
        lambda x: ck.linear(x, weight, order="tree"),
        lambda x: ck.layer_norm(x, weight[0], weight[1]),
        lambda x: ck.log_softmax(ck.gelu(x)),
        lambda x: ck.embedding(ids, x),
        lambda x: ck.linear_logp(x, weight, target),
        lambda x: ck.block_sparse_attention(*[x[None, :, None]] * 3, causal=True),
    ]
    results = []
    for call in calls:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.backward(torch.ones_like(y))
        results += [y.detach(), leaf.grad]
    return results


def test_ops_of_ours_do_not_see_the_mode():
    want = ours()
    for strict in (False, True):
        with ck.batch_invariant(strict=strict):
            got = ours()
        assert all(map(same_bytes, got, want))


def excluded(*_) -> torch.Tensor:
    """1 where the mode cannot be seen."""
    hidden = torch._C._dispatch_tls_is_dispatch_key_excluded(torch_ops.MODE)
    return torch.full((), float(hidden), dtype=FP32, device="cpu")


probe = torch_ops.define_op(
    "batch_invariant_probe(Tensor x) -> Tensor",
    lambda x: excluded(),
    fake=lambda x: x.new_empty(()),
    setup=lambda ctx, inputs, output: None,
    backward=lambda ctx, dy: (excluded(),),
)


def hidden() -> tuple[float, float]:
    """Whether an op's kernel, and its backward, are out of the mode that calls them."""
    leaf = torch.zeros((), requires_grad=True)
    with ck.batch_invariant():
        y = probe(leaf)
        y.backward()
    return y.item(), leaf.grad.item()


def test_the_mode_is_excluded_inside_ops_of_ours(monkeypatch):
    assert hidden() == (1.0, 1.0)
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    monkeypatch.setattr(torch_ops, "_MODE_ALONE", nothing)
    assert hidden() == (0.0, 0.0)


# ---- forms of a call -----------------------------------------------------------------------------


def test_out_and_in_place_variants():
    a, b, base = drawn(5, 8), drawn(8, 4, seed=2), drawn(5, 4, seed=3)
    with ck.batch_invariant(strict=True):
        into = torch.empty(0)
        assert torch.mm(a, b, out=into) is into
        assert same_bytes(into, torch.mm(a, b)) and same_bytes(into, ck.matmul(a, b))
        wide = torch.empty(5, dtype=torch.float32)
        assert same_bytes(torch.sum(a.bfloat16(), -1, out=wide), a.bfloat16().sum(-1, dtype=FP32))
        added = base.clone().addmm_(a, b, beta=0.5)
        assert same_bytes(added, torch.addmm(base, a, b, beta=0.5))
        assert same_bytes(a.clone().sigmoid_(), torch.sigmoid(a))
        leaf = a.clone().requires_grad_()
        hidden = leaf * 1
        F.silu(hidden, inplace=True).sum().backward()
        other = a.clone().requires_grad_()
        F.silu(other).sum().backward()
        assert same_bytes(leaf.grad, other.grad)
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            torch.mm(leaf, b, out=into)
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(a, b, out=torch.empty(5, 4, dtype=torch.float64))


def test_sums_of_integers_and_wide_numbers_are_torchs():
    whole = torch.arange(12).view(3, 4)
    wide = drawn(3, 4, dtype=torch.float64)
    with ck.batch_invariant():
        with Seen() as seen:
            assert whole.sum(-1).tolist() == [6, 22, 38] and (whole > 3).sum() == 8
            assert same_bytes(wide @ wide.mT, inside(lambda: wide @ wide.mT, strict=False))
            assert same_bytes(wide.mean(-1), torch.mean(wide, -1))
        assert not any(name.startswith("cute_kernels") for name in seen.names)
    want = wide @ wide.mT
    with ck.batch_invariant():
        assert same_bytes(wide @ wide.mT, want)
        assert whole.float().mean().item() == 5.5 and whole.sum(dtype=FP32).dtype == FP32


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_sizes_of_zero(dtype):
    none, some, weight = (torch.zeros(*s, dtype=dtype) for s in ((0, 8), (3, 0), (4, 8)))
    with ck.batch_invariant(strict=True):
        assert F.linear(none, weight).shape == (0, 4)
        assert torch.mm(some, some.mT).tolist() == [[0.0] * 3] * 3
        assert torch.bmm(none[None], weight.mT[None]).shape == (1, 0, 4)
        assert torch.bmm(some[None], some.mT[None]).tolist() == [[[0.0] * 3] * 3]
        base = torch.full((3, 3), 2.0, dtype=dtype)
        assert torch.addmm(base, some, some.mT, beta=0.5).tolist() == [[1.0] * 3] * 3
        assert torch.addmm(base * torch.nan, some, some.mT, beta=0).tolist() == [[0.0] * 3] * 3
        assert some.sum(-1).tolist() == [0.0] * 3 and some.mean(-1).isnan().all()
        assert none.sum(0).tolist() == [0.0] * 8 and none.sum().item() == 0.0
        assert F.softmax(none, -1).shape == (0, 8) and F.silu(none).shape == (0, 8)
        assert F.layer_norm(none, (8,)).shape == (0, 8) and F.rms_norm(none, (8,)).shape == (0, 8)
        q = torch.zeros(2, 3, 0, 16, dtype=dtype)
        assert F.scaled_dot_product_attention(q, q, q).shape == (2, 3, 0, 16)
        assert torch.tensor(2.0, dtype=dtype).sum().item() == 2.0
        assert F.softmax(torch.tensor(2.0, dtype=dtype), 0).item() == 1.0


@pytest.mark.parametrize("needs", [(True, False), (False, True), (True, True)])
def test_gradients_that_nobody_asked_for_are_not_computed(monkeypatch, needs):
    products, true = [], ops.batched_product
    a, b = drawn(2, 3, 4).requires_grad_(needs[0]), drawn(2, 4, 5).requires_grad_(needs[1])
    with ck.batch_invariant(strict=True):
        y = torch.bmm(a, b)
        with monkeypatch.context() as patch:
            patch.setattr(
                ops, "batched_product", lambda *args: products.append(args) or true(*args)
            )
            y.backward(drawn(2, 3, 5, seed=2))
    assert len(products) == sum(needs)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (-1, 0), ()], ids=str)
def test_sums_over_any_dimensions(dims):
    x = drawn(4, 5, 6)
    for keep in (False, True):
        want = x.double().sum(dims, keep)
        with ck.batch_invariant(strict=True):
            got, mean = x.sum(dims, keep), x.mean(dims, keep)
        assert got.shape == want.shape and (got.double() - want).abs().max() < 1e-5
        count = x.numel() / want.numel()
        assert (mean.double() - want / count).abs().max() < 1e-6


def attend(q, k, v, **options):
    with ck.batch_invariant(strict=True):
        return F.scaled_dot_product_attention(q, k, v, **options)


def test_attention_of_padded_sequences_is_that_of_each_alone():
    """A bool mask says where a sequence begins: padding on the left shifts no position."""
    q, k, v = (drawn(1, 4, 21, 40, seed=s, dtype=BF16) for s in (1, 2, 3))
    alone = attend(q, k, v, is_causal=True)
    for before, after in ((0, 9), (9, 0), (3, 4)):
        pad = (0, 0, before, after)
        longer = [F.pad(t, pad) for t in (q, k, v)]
        length = 21 + before + after
        index = torch.arange(length)
        real = (index >= before) & (index < before + 21)
        mask = (index[:, None] >= index) & real & real[:, None]
        got = attend(*longer, attn_mask=mask[None, None])
        assert same_bytes(got[:, :, before : before + 21], alone)


#: Of q and k, of v -> the room of q and k that both are filled up to, if a kernel has one.
ROOMS = {
    (40, 40): 64,
    (64, 96): 96,
    (128, 129): 256,
    (160, 128): 192,
    (192, 192): 256,
    (257, 8): None,
    (8, 257): None,
}


@pytest.mark.parametrize(("sizes", "room"), ROOMS.items(), ids=str)
def test_heads_are_filled_up_to_a_size_that_kernels_have(monkeypatch, sizes, room):
    """Without a bit of it in the values; a size that fits no room is torch's composition."""
    sizes_of_calls = []
    true = api.block_sparse_attention

    def run(q, k, v, *args, **options):
        sizes_of_calls.append((q.shape[3], k.shape[3], v.shape[3]))
        return true(q, k, v, *args, **options)

    monkeypatch.setattr(api, "block_sparse_attention", run)
    dim, value_dim = sizes
    q, k = (drawn(1, 2, 19, dim, seed=s, dtype=BF16) for s in (1, 2))
    v = drawn(1, 2, 19, value_dim, seed=3, dtype=BF16)
    got = attend(q, k, v)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert got.shape == want.shape and (got.double() - want).abs().max() < 2.0**-6
    assert sizes_of_calls == ([] if room is None else [(room, room, VALUE_DIMS[room])])


S = (2, 4, 21, 40)
#: Name -> (shapes of q, k and v, options of the call).
ATTENTION = {
    "none": (S, S, S, {}),
    "causal": (S, S, S, {"is_causal": True, "scale": 0.3}),
    "longer keys": (S, (2, 4, 33, 40), (2, 4, 33, 24), {"is_causal": True}),
    "gaps": (S, S, S, {"attn_mask": (drawn(21, 21) > 0) | torch.eye(21, dtype=torch.bool)}),
    "heads": (S, S, S, {"attn_mask": (drawn(2, 4, 21, 21) > 0) | torch.eye(21, dtype=torch.bool)}),
    "numbers": (S, S, S, {"attn_mask": drawn(21, 21, dtype=BF16)}),
    "grouped": (S, (2, 2, 21, 40), (2, 2, 21, 40), {"enable_gqa": True}),
    "wide": (*[(2, 2, 9, 160)] * 3, {}),
    "wider": (*[(2, 2, 9, 300)] * 3, {}),
    "deep": (*[(2, 2, 9, 192)] * 2, (2, 2, 9, 128), {"is_causal": True}),
    "3-D": (*[(4, 21, 40)] * 3, {}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_values_of_attention(name):
    *shapes, options = ATTENTION[name]
    half = [drawn(*shape, seed=s, dtype=BF16) for s, shape in enumerate(shapes, 1)]
    mask = options.get("attn_mask")
    wide = {"attn_mask": mask.double()} if mask is not None and mask.dtype == BF16 else {}
    want = F.scaled_dot_product_attention(*(t.double() for t in half), **options | wide)
    leaves = [t.clone().requires_grad_() for t in half]
    got = attend(*leaves, **options)
    assert got.dtype == BF16 and got.shape == want.shape
    assert (got.double() - want).abs().max() < 2.0**-6
    with ck.batch_invariant(strict=True):
        got.sum().backward()
    assert all(t.grad.isfinite().all() and t.grad.abs().max() > 0 for t in leaves[2:])


@pytest.mark.parametrize("function", ["linear", "mv", "layer_norm", "softmax", "attention"])
def test_autocast_casts_as_without_the_mode(function):
    case = CASES[function]
    rows = row_op(function, FP32).rows(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        want = case.call(rows).dtype
        with ck.batch_invariant(strict=True):
            got = case.call(rows)
            alone = torch.cat([case.call(row[None]) for row in rows])
    assert got.dtype == want and same_bytes(got, alone)
