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
from ..operands import matrix, most_ctas, padded_copy, padded_empty
from . import config, tiles
from .config import Config
from .tensors import Head, Rows, Upstream

#: Columns of a tile; with two accumulators (of a tree), or a bias's loads, registers are fewer.
TILE_N, NARROW_N = 256, 128


def states(hidden: torch.Tensor, head: Head, rows: Rows, entropy: bool) -> torch.Tensor:
    """int64 [P, T, C] of the head's rows, in P runs."""
    h, w, bias, w_major = _operands(hidden, head)
    chosen = _config(hidden.dtype, w_major, head, entropy)
    workers = max_clusters(hidden.device)
    tile = (chosen.tile_m * chosen.cluster_m, chosen.tile_n)
    count = tiles.runs(h.shape[0], w.shape[0], tile, workers)
    columns = config.columns_of_state(entropy)
    parts = rows.target.new_empty(count, h.shape[0], columns)
    place = head.start, head.vocab, head.softcap
    call(hidden.device, _forward(chosen), h, w, bias, *rows, parts, *place, workers)
    return parts


def gradients(hidden: torch.Tensor, head: Head, rows: Rows, upstream: Upstream) -> torch.Tensor:
    """[T, V] of the dtype of ``hidden``: the gradient of the head's logits; rows are padded."""
    h, w, bias, w_major = _operands(hidden, head)
    chosen = _config(hidden.dtype, w_major, head, upstream.of_entropy is not None)
    out = padded_empty(h, h.shape[0], w.shape[0])
    place = head.start, head.vocab, head.softcap
    tokens = (*rows, *upstream)
    workers = max_clusters(hidden.device)
    call(hidden.device, _gradient(chosen), h, w, bias, *tokens, out, *place, workers)
    return out


def _operands(hidden: torch.Tensor, head: Head):
    """(hidden, weight, bias, the weight's major), as the kernels take them."""
    h, major = matrix(hidden, "logp", "hidden")
    if major != "k":
        h = padded_copy(hidden, "logp", "hidden")
    w, w_major = matrix(head.weight, "logp", "weight")
    bias = head.bias
    if bias is not None:
        bias = log.contiguous("logp", "bias", bias, "a stride of 1")
    return h, w, bias, w_major


def _config(dtype: torch.dtype, w_major: str, head: Head, entropy: bool) -> Config:
    name, order = config.DTYPE_NAMES[dtype], head.order
    return config_of(name, w_major, order, head.bias is not None, head.softcap > 0, entropy)


def config_of(
    dtype: str, w_major: str, order: str, bias: bool, softcap: bool, entropy: bool
) -> Config:
    """The configuration of either kernel, with the widest tile that spills no register."""
    tile_n = TILE_N if order == "chain" and not bias else NARROW_N
    return Config(dtype, w_major, order, bias, softcap, entropy, tile_n)


def max_clusters(device: torch.device) -> int:
    """How many clusters of a persistent grid fit the device at once."""
    return max(1, most_ctas(device) // Config.cluster_m)


@functools.cache
def _forward(chosen: Config) -> Callable:
    return cache.get(forward_entry(chosen), "sm_90a")


@functools.cache
def _gradient(chosen: Config) -> Callable:
    return cache.get(gradient_entry(chosen), "sm_90a")


def forward_entry(chosen: Config) -> Kernel:
    """One configuration of the forward as the cache and the catalogue know it."""
    return Kernel.of("logp_fwd_sm90", f"{__package__}.kernel_fwd_sm90", chosen)


def gradient_entry(chosen: Config) -> Kernel:
    """One configuration of the gradient of logits, likewise."""
    return Kernel.of("logp_grad_sm90", f"{__package__}.kernel_grad_sm90", chosen)


def configs() -> Iterator[Config]:
    """Every configuration that can be chosen."""
    flags = (False, True)
    for order, dtype, w_major, bias, softcap, entropy in itertools.product(
        config.ORDERS, ("bf16", "fp16"), ("k", "mn"), flags, flags, flags
    ):
        yield config_of(dtype, w_major, order, bias, softcap, entropy)


def catalogue() -> Iterator[Entry]:
    """Every kernel that this launcher can ask for."""
    for chosen in configs():
        # 168 registers is all that 384 threads can start with; the roles then trade theirs.
        expect = Expect(f"64x{chosen.tile_n}x16", max_registers=168, max_shared=232448)
        yield Entry(forward_entry(chosen), "A", expect)
        yield Entry(gradient_entry(chosen), "A", expect)
