"""The SM90 launcher: operands as TMA can address them, a compiled kernel, outputs, one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from .. import log
from ..compile import cache
from ..compile.call import call
from ..compile.kernel import Entry, Expect, Kernel
from ..operands import matrix, most_ctas, padded_empty
from . import config, tiles
from .config import Config, FewConfig, FinishConfig
from .tensors import Head, Rows, Upstream

#: Columns of a tile; with two accumulators (of a tree), or a bias's loads, registers are fewer.
TILE_N, NARROW_N = 256, 128


def states(hidden: torch.Tensor, head: Head, rows: Rows, entropy: bool) -> torch.Tensor:
    """int64 [P, T, C] of the head's rows, in P runs."""
    h, w, bias = _operands(hidden, head)
    tokens, columns = h.shape[0], config.columns_of_state(entropy)
    place = head.start, head.vocab, head.softcap
    plain = head.order == "chain" and not entropy and not head.softcap
    tile = tiles.few(tokens, plain)
    if tile is not None:
        few = FewConfig(*_options(hidden.dtype, head, entropy), *tile)
        count = min(-(-len(w) // tile.tile_n), most_ctas(hidden.device) * tile.ctas_per_sm)
        parts = rows.target.new_empty(count, tokens, columns)
        call(hidden.device, _few(few), h, w, bias, *rows, parts, *place)
        return parts
    chosen = config_of(*_options(hidden.dtype, head, entropy))
    workers = max_clusters(hidden.device)
    of_cluster = (chosen.tile_m * chosen.cluster_m, chosen.tile_n)
    count = tiles.runs(tokens, len(w), of_cluster, workers)
    parts = rows.target.new_empty(count, tokens, columns)
    call(hidden.device, _forward(chosen), h, w, bias, *rows, parts, *place, workers)
    return parts


def gradients(hidden: torch.Tensor, head: Head, rows: Rows, upstream: Upstream) -> torch.Tensor:
    """[T, V] of the dtype of ``hidden``: the gradient of the head's logits; rows are padded."""
    h, w, bias = _operands(hidden, head)
    chosen = config_of(*_options(hidden.dtype, head, upstream.of_entropy is not None))
    out = padded_empty(h, h.shape[0], w.shape[0])
    place = head.start, head.vocab, head.softcap
    tokens = (*rows, *upstream)
    workers = max_clusters(hidden.device)
    call(hidden.device, _gradient(chosen), h, w, bias, *tokens, out, *place, workers)
    return out


def finish(
    parts: torch.Tensor, rows: Rows
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log p, lse2, entropy or None) of states [P, T, C], as `exact.finish`."""
    results = [torch.empty_like(rows.scale) for _ in range(3)]
    if parts.shape[2] == config.WEIGHTED:
        results[2] = None
    chosen = FinishConfig(results[2] is not None)
    call(parts.device, _finish(chosen), parts, *rows, *results)
    return tuple(results)


def _operands(hidden: torch.Tensor, head: Head):
    """(hidden, weight, bias), as the kernels take them: row-major."""
    h, w = (_rows(t, name) for t, name in ((hidden, "hidden"), (head.weight, "weight")))
    bias = head.bias
    if bias is not None:
        bias = log.contiguous("logp", "bias", bias, "a stride of 1")
    return h, w, bias


def _rows(t: torch.Tensor, name: str) -> torch.Tensor:
    adapt = matrix(t, "logp", name, k_major=True).adapt
    return t if adapt is None else adapt(t)


def _options(dtype: torch.dtype, head: Head, entropy: bool) -> tuple:
    """The first fields of `Config` and of `FewConfig`."""
    name = config.DTYPE_NAMES[dtype]
    return name, head.order, head.bias is not None, head.softcap > 0, entropy


def config_of(dtype: str, order: str, bias: bool, softcap: bool, entropy: bool) -> Config:
    """The configuration of either kernel, with the widest tile that spills no register."""
    tile_n = TILE_N if order == "chain" and not bias else NARROW_N
    return Config(dtype, order, bias, softcap, entropy, tile_n)


def max_clusters(device: torch.device) -> int:
    """How many clusters of a persistent grid fit the device at once."""
    return max(1, most_ctas(device) // Config.cluster_m)


@functools.cache
def _forward(chosen: Config) -> Callable:
    return cache.get(forward_entry(chosen), "sm_90a")


@functools.cache
def _few(chosen: FewConfig) -> Callable:
    return cache.get(few_entry(chosen), "sm_90a")


@functools.cache
def _gradient(chosen: Config) -> Callable:
    return cache.get(gradient_entry(chosen), "sm_90a")


@functools.cache
def _finish(chosen: FinishConfig) -> Callable:
    return cache.get(finish_entry(chosen), "sm_90a")


def forward_entry(chosen: Config) -> Kernel:
    """One configuration of the forward as the cache and the catalogue know it."""
    return Kernel.of("logp_fwd_sm90", f"{__package__}.kernel_fwd_sm90", chosen)


def few_entry(chosen: FewConfig) -> Kernel:
    """One configuration of the forward for few tokens, likewise."""
    return Kernel.of("logp_few_sm90", f"{__package__}.kernel_few_sm90", chosen)


def gradient_entry(chosen: Config) -> Kernel:
    """One configuration of the gradient of logits, likewise."""
    return Kernel.of("logp_grad_sm90", f"{__package__}.kernel_grad_sm90", chosen)


def finish_entry(chosen: FinishConfig) -> Kernel:
    """What states end in, likewise."""
    return Kernel.of("logp_finish_sm90", f"{__package__}.kernel_finish_sm90", chosen)


def options() -> Iterator[tuple]:
    """The first fields of `Config` and of `FewConfig`, in all combinations."""
    flags = (False, True)
    return itertools.product(("bf16", "fp16"), config.ORDERS, flags, flags, flags)


def few_configs() -> Iterator[FewConfig]:
    """Every configuration of the forward for few tokens that can be chosen."""
    for chosen in options():
        _, order, _, softcap, entropy = chosen
        plain = order == "chain" and not entropy and not softcap
        for tile in tiles.FEW_PLAIN:
            if tiles.few(tile.tile_m, plain) == tile:
                yield FewConfig(*chosen, *tile)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for."""
    for chosen in options():
        wide = config_of(*chosen)
        # 168 registers is all that 384 threads can start with; the roles then trade theirs.
        expect = Expect(f"64x{wide.tile_n}x16", max_registers=168, max_shared=232448)
        yield Entry(forward_entry(wide), "A", expect)
        yield Entry(gradient_entry(wide), "A", expect)
    for few in few_configs():
        # Each quarter of an SM has 512 registers for a lane, for every warp that it holds.
        warps = (few.tile_n // 16 + 1) * few.ctas_per_sm
        registers = min(248, 512 // -(-warps // 4) // 8 * 8)
        shared = 232448 // few.ctas_per_sm
        expect = Expect(f"64x{few.tile_m}x16", max_registers=registers, max_shared=shared)
        yield Entry(few_entry(few), "A", expect)
    for entropy in (False, True):
        expect = Expect(None, max_registers=96, max_shared=1024)
        yield Entry(finish_entry(FinishConfig(entropy)), "A", expect)
