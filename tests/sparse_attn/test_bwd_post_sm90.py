"""The kernel after the SM90 backward, alone: round(dq scale), byte by byte, in rows and columns."""

from __future__ import annotations

import pytest
import torch

import ptxsim
from cute_kernels.sparse_attn import config
from ptxsim import modes, skips
from tests import certified, contract

mutated = skips.import_module("tests.sparse_attn.mutated")
simulated = skips.import_module("tests.sparse_attn.simulated")
pytestmark = certified.marks("sparse_attn")

DTYPES = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}
#: A last tile that ends in its second half, and between two rows that a thread has.
BATCH, ROWS, HEADS = 2, 325, 3
SCALE = 0.3


def chosen(head_dim: int, dtype: str = "bf16", visited: bool = False) -> config.PostConfig:
    tile_m = config.configure(dtype, head_dim, "none", True).tile_m
    return config.PostConfig(dtype, head_dim, tile_m, visited=visited)


def accumulators(post: config.PostConfig) -> torch.Tensor:
    """Random fp32: both signs, subnormal numbers, and some that are too great for a dtype."""
    generator = torch.Generator().manual_seed(post.head_dim)
    shape = BATCH, HEADS, -(-ROWS // post.tile_m), post.tile_m * post.head_dim
    exponents = torch.randint(-140, 128, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents)


def rounded(post: config.PostConfig, acc: torch.Tensor) -> torch.Tensor:
    """dQ by torch: accumulators of WGMMA are two columns of a row and two of the row 8 below."""
    sizes = {"warpgroup": 2, "four": -1, "warp": 4, "row": 8, "lane": 4, "half": 2, "pair": 2}
    by_thread = acc.unflatten(3, tuple(sizes.values()))
    places = {name: 3 + i for i, name in enumerate(sizes)}
    stacked = "warpgroup", "warp", "half", "row", "four", "lane", "pair"
    aside = "warp", "half", "row", "warpgroup", "four", "lane", "pair"
    names = stacked if post.tile_m == 128 else aside
    tiles = by_thread.permute(0, 1, 2, *(places[name] for name in names)).flatten(3)
    rows = tiles.unflatten(3, (post.tile_m, post.head_dim)).flatten(2, 3)[:, :, :ROWS]
    return (rows * torch.tensor(SCALE)).to(DTYPES[post.dtype]).transpose(1, 2).contiguous()


def run(post: config.PostConfig, acc: torch.Tensor, semaphore=None, kernel=None) -> torch.Tensor:
    dq = modes.poisoned((BATCH, ROWS, HEADS, post.head_dim), DTYPES[post.dtype], "nan")
    (kernel or simulated.kernel)(post)(acc, dq, semaphore, None, SCALE)
    return dq


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("head_dim", config.HEAD_DIMS)
def test_bytes(head_dim, dtype):
    post = chosen(head_dim, dtype)
    acc = accumulators(post)
    assert contract.same_bytes(run(post, acc), rounded(post, acc))


@pytest.mark.parametrize("head_dim", simulated.widths(128))
def test_every_mode(head_dim):
    post = chosen(head_dim)
    acc = accumulators(post)
    results = modes.run_modes(lambda: run(post, acc), modes.QUICK_MODES)
    assert contract.same_bytes(results["default"], rounded(post, acc))


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_tiles_without_a_visit_are_zeros(head_dim):
    post = chosen(head_dim, visited=True)
    acc = accumulators(post)
    semaphore = torch.arange(acc[..., 0].numel(), dtype=torch.int32).view(acc.shape[:3]) % 3
    zeros = torch.where((semaphore > 0)[..., None], acc, 0.0)
    acc[semaphore == 0] = torch.nan
    assert contract.same_bytes(run(post, acc, semaphore), rounded(post, zeros))


@pytest.mark.nightly
def test_more_sequences_than_a_grid_has_z():
    """The kernels before and after a backward; one accumulator for all sequences."""
    count, post = 65_536, chosen(64)
    pre = config.PreConfig("bf16", 64, post.tile_m)
    acc = accumulators(post)[:1, :1, :1].expand(count, -1, -1, -1)
    dq = torch.empty(count, 1, 1, 64, dtype=torch.bfloat16)
    simulated.kernel(post)(acc, dq, None, None, SCALE)
    assert contract.same_bytes(dq, rounded(post, acc[:1])[:, :1, :1].expand_as(dq).contiguous())
    out = torch.randn(count, 1, 1, 64).bfloat16()
    lse2, delta = torch.empty(2, count, 1, post.tile_m)
    semaphore, counter = (torch.ones(shape, dtype=torch.int32) for shape in ((count, 1, 1), (1,)))
    operands = out, torch.ones_like(out), torch.zeros(count, 1, 1), None, lse2, delta
    simulated.kernel(pre)(
        *operands, torch.empty_like(acc[:1]).expand_as(acc), semaphore, counter, None
    )
    assert not semaphore.any() and not counter.any() and not lse2[:, :, 0].any()
    assert (delta[:, 0, 0] - out.float().sum((1, 2, 3))).abs().max() < 1e-4


# ---- mutants -------------------------------------------------------------------------------------

NAME = "sparse_attn.kernel_bwd_post_sm90"
MUTANTS = {
    "a lane of the other pair": ("bfly(sent, offset=2)", "bfly(sent, offset=3)"),
    "what a lane has is sent": ("sent = even_value if odd", "sent = odd_value if odd"),
    "pairs in another order": (
        "received if odd else even_value, odd_value if odd else received",
        "odd_value if odd else received, received if odd else even_value",
    ),
    "halves in another order": ("[received[i] if high else low", "[upper[i] if high else low"),
    "every lane the same columns": ("half, four + coord.lane)", "half, four)"),
    "the tail transposed": (
        "lane // 2, whole + coord.lane % 2",
        "lane % 2, whole + coord.lane // 2",
    ),
    "the other row is 4 below": ("coord.row + half * 8", "coord.row + half * 4"),
    "warpgroups have the same columns": ("warpgroup * (self.head_dim // 2)", "warpgroup * 0"),
    "warpgroups have the same rows": ("row += warpgroup * 64", "row += warpgroup * 0"),
    "rounded before it is scaled": (
        "(rAcc.load() * scale).to(self.dtype)",
        "(rAcc.load().to(self.dtype).to(cutlass.Float32) * scale).to(self.dtype)",
    ),
    "one row too many": (f"row < rows.end:\n{12 * ' '}cute", f"row <= rows.end:\n{12 * ' '}cute"),
}
#: The head sizes that have the code of a mutant, if not all.
SIZES = {"the tail transposed": 96, "warpgroups have the same rows": 64}


@pytest.mark.mutants
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(tmp_path, name):
    post = chosen(SIZES.get(name, 128))
    acc = accumulators(post)
    try:
        dq = run(post, acc, kernel=mutated.kernels(tmp_path, NAME, *MUTANTS[name]))
    except ptxsim.PtxsimError:
        return
    assert not contract.same_bytes(dq, rounded(post, acc))
