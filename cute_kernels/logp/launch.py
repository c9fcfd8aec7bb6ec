"""The SM90 launcher: operands as TMA can address them, a compiled kernel, outputs, one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from .. import log
from ..compile import cache
from ..compile.call import allocator, bind
from ..compile.kernel import Entry, Expect, Kernel
from ..runtime.operands import matrix, most_ctas, padded_width
from ..runtime.plan_cache import Plan, launcher
from . import config, tiles
from .config import Config, FewConfig, FinishConfig
from .tensors import Head, Rows, Upstream

#: Columns of a tile; with two accumulators (of a tree), or a bias's loads, registers are fewer.
TILE_N, NARROW_N = 256, 128


def plan_states(
    hidden: torch.Tensor, head: Head, rows: Rows, entropy: bool, sums: torch.Tensor | None = None
) -> Plan:
    """Launch plan of int64 [P, T, C]: states of the head's rows, in P runs.

    ``sums``: fp32 [T', V'] or None; it gets the first tokens' logits before bias and softcap.
    """
    device, adapt = hidden.device, _adapter(hidden, head)
    tokens, vocab = hidden.shape[0], len(head.weight)
    scalars = head.start, head.vocab, head.softcap
    options = _options(hidden.dtype, head, entropy)
    plain = head.order == "chain" and not entropy and not head.softcap
    tile = tiles.few(tokens, plain) if sums is None else None
    new_states = functools.partial(_state_allocator, tokens, entropy, rows.target.dtype, device)
    if tile is not None:
        launch = bind(device, _few(FewConfig(*options, *tile)))
        new = new_states(min(-(-vocab // tile.tile_n), most_ctas(device) * tile.ctas_per_sm))

        def run_few(hidden, head, rows, entropy, sums=None):
            parts = new()
            launch(*adapt(hidden, head), *rows, parts, *scalars)
            return parts

        return Plan(run_few)

    wide = replace(config_of(*options), keep=sums is not None)
    workers = max_clusters(device)
    launch = bind(device, _forward(wide))
    tile_of_cluster = (wide.tile_m * wide.cluster_m, wide.tile_n)
    new = new_states(tiles.runs(tokens, vocab, tile_of_cluster, workers))

    def run(hidden, head, rows, entropy, sums=None):
        parts = new()
        launch(*adapt(hidden, head), *rows, parts, sums, *scalars, workers)
        return parts

    return Plan(run)


states = launcher(plan_states)


def _state_allocator(
    tokens: int, entropy: bool, dtype: torch.dtype, device: torch.device, runs: int
) -> Callable[[], torch.Tensor]:
    return allocator((runs, tokens, config.columns_of_state(entropy)), dtype, device)


def plan_gradients(
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    upstream: Upstream,
    out: torch.Tensor | None = None,
) -> Plan:
    """Launch plan of [T, V] of the dtype of ``hidden``: the gradient of the head's logits.

    Rows of the result are padded to multiples of 16 bytes, as those of ``out`` must be.
    """
    device, adapt = hidden.device, _adapter(hidden, head)
    chosen = config_of(*_options(hidden.dtype, head, upstream.of_entropy is not None))
    workers, vocab = max_clusters(device), len(head.weight)
    launch = bind(device, _gradient(chosen))
    new = allocator((len(hidden), padded_width(vocab, hidden.dtype)), hidden.dtype, device)
    scalars = head.start, head.vocab, head.softcap, workers

    def run(hidden, head, rows, upstream, out=None):
        out = new()[:, :vocab] if out is None else out
        launch(*adapt(hidden, head), *rows, *upstream, out, *scalars)
        return out

    return Plan(run, fresh=False)


gradients = launcher(plan_gradients)


def plan_finish(parts: torch.Tensor, rows: Rows) -> Plan:
    """Launch plan of (log p, lse2, entropy or None) of states [P, T, C], as `exact.finish`."""
    entropy = parts.shape[2] != config.WEIGHTED
    launch = bind(parts.device, _finish(FinishConfig(entropy)))
    new = allocator(rows.scale.shape, rows.scale.dtype, parts.device)

    def run(parts, rows):
        results = new(), new(), new() if entropy else None
        launch(parts, *rows, *results)
        return results

    return Plan(run)


finish = launcher(plan_finish)


def _adapter(hidden: torch.Tensor, head: Head) -> Callable[..., tuple]:
    """``adapt(hidden, head)`` returns (hidden, weight, bias) as the kernels take them."""
    adapt_h, adapt_w = (
        matrix(t, "logp", name, k_major=True).adapt
        for t, name in ((hidden, "hidden"), (head.weight, "weight"))
    )

    def adapt(hidden, head):
        bias = head.bias
        if bias is not None:
            bias = log.contiguous("logp", "bias", bias, "a stride of 1")
        h = hidden if adapt_h is None else adapt_h(hidden)
        return h, head.weight if adapt_w is None else adapt_w(head.weight), bias

    return adapt


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


def entry(name: str, chosen: Config | FewConfig | FinishConfig) -> Kernel:
    """The cache and catalogue entry of one configuration of ``kernel_<name>_sm90``."""
    return Kernel.in_file(__package__, f"{name}_sm90", chosen)


def _compiled(name: str) -> Callable:
    """Function that returns the compiled kernel of a configuration."""
    return functools.cache(lambda chosen: cache.get(entry(name, chosen), "sm_90a"))


_forward, _few, _gradient, _finish = map(_compiled, ("fwd", "few", "grad", "finish"))


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
        yield Entry(entry("fwd", wide), "A", expect)
        yield Entry(entry("fwd", replace(wide, keep=True)), "A", expect)
        yield Entry(entry("grad", wide), "A", expect)
    for few in few_configs():
        # Each quarter of an SM has 512 registers for a lane, for every warp that it holds.
        warps = (few.tile_n // 16 + 1) * few.ctas_per_sm
        registers = min(248, 512 // -(-warps // 4) // 8 * 8)
        shared = 232448 // few.ctas_per_sm
        expect = Expect(f"64x{few.tile_m}x16", max_registers=registers, max_shared=shared)
        yield Entry(entry("few", few), "A", expect)
    for entropy in (False, True):
        expect = Expect(None, max_registers=96, max_shared=1024)
        yield Entry(entry("finish", FinishConfig(entropy)), "A", expect)
