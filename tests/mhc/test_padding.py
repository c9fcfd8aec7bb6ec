"""Rows that vectors do not fit are copied: the bytes that masked vectors of one element gave."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from cute_kernels.mhc import launch as planners
from cute_kernels.mhc import tensors
from cute_kernels.mhc.tensors import Expand, Padding, Parts, Streams, Upstream
from cute_kernels.runtime import plan_cache
from ptxsim.skips import requires_sim
from tests.contract import bits, same_bytes
from tests.kernels.edited import kernels
from tests.mhc import simulated as system
from tests.mhc.launcher_cases import BF16, FP32, Given, Shape, given, shifted
from tests.mhc.simulated import launchers as launch
from tests.mhc.simulated import simulated
from tests.old_memory import old_memory

#: What runs at every commit while the kernels are proved.
EACH_COMMIT = "test_odd_rows_have_the_bytes_of_masked_vectors"


def simulated_test(test: Callable) -> Callable:
    for mark in (requires_sim, pytest.mark.sim, pytest.mark.simulates("mhc", often=EACH_COMMIT)):
        test = mark(test)
    return test


INF, NAN = float("inf"), float("nan")


# ---- the copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [Streams(4, "cn"), Streams(2, "nc")], ids=str)
def test_a_copy_has_zeros_where_a_masked_vector_has(streams):
    """By stream and channel: the rows, then +0; of NaN the payload stays."""
    n, c = streams.n, 5
    x = torch.arange(3 * n * c, dtype=torch.int32).add(0x7FC00000).view(torch.float32).view(3, -1)
    f = x[:, :c].contiguous()
    padding = Padding.needed(x, streams, Expand(f, f[0], None))
    assert padding.width == (6 if streams.layout == "cn" else 8)
    padded, same, expand = padding.pad(x, streams, Expand(f, f[0], None))
    assert same is streams
    for rows, copy, split in ((x, padded, n), (f, expand.f, 1)):
        by_channel = [
            t.view(3, -1, split).mT if streams.layout == "cn" else t.view(3, split, -1)
            for t in (rows, copy)
        ]
        assert same_bytes(by_channel[1][..., :c].contiguous(), by_channel[0].contiguous())
        assert not bits(by_channel[1][..., c:].contiguous()).any()
    gradients = tensors.ProjectionGradients(padded, Parts(padded[None]))
    cut = padding.cut(gradients)
    assert same_bytes(cut.dx, x) and same_bytes(cut.d_psi.values[0], x)


def test_whole_aligned_vectors_are_not_copied():
    x = torch.zeros(3, 24)
    for streams, whole in ((Streams(4, "cn"), True), (Streams(4, "nc"), False)):
        assert (Padding.needed(x, streams, Upstream(x)) is None) == whole
    assert Padding.needed(shifted(x), Streams(4, "cn")) == (Streams(4, "cn"), 6, 6)


# ---- the bytes -----------------------------------------------------------------------------------


def wild(shape: Shape) -> Given:
    """Infinities and NaN in every operand, a token each; -0; products that round to 0."""
    g = given(shape)
    g = g._replace(**{name: getattr(g, name).clone() for name in g._fields if name in ROWS})
    g.x[0, 1], g.x[1, 0], g.f[2, 0], g.d_out[3], g.dy[4, 0] = NAN, INF, INF, INF, -INF
    g.post[5], g.post[6, 0], g.res[7], g.pre[8] = INF, NAN, INF, INF
    g.x[::3] *= 1e-30
    g.dy[::3] *= -1e-30
    g.x[1::3, ::2] = -0.0
    return g


ROWS = ("x", "dy", "f", "d_out", "pre", "post", "res")


def forward(g: Given) -> list:
    """Streams that are made, projected and collapsed."""
    fused = launch.project(g.x, g.mapping, g.streams, g.expand)
    return [*fused, *launch.combine(g.x, g.streams, g.pre, g.expand)]


def reduced(g: Given) -> list:
    """Every gradient of a pass over the channels."""
    by = Expand(g.f, g.bias, g.post)
    end = launch.reduce_channels(g.x, g.streams, Upstream(g.dy, res=g.res), by, True)
    out = launch.reduce_channels(g.x, g.streams, Upstream(d_out=g.d_out, pre=g.pre), None, True)
    return [*end, *out]


def projected_back(g: Given) -> list:
    """dx and dpsi, with the other gradients of x."""
    upstream = Upstream(g.dy, g.d_out, g.res, g.pre)
    of = (g.x, g.h, g.ms - 0.7, g.mapping, g.streams, upstream, (True, True))
    return list(launch.project_backward(*of))


def results(run: Callable, g: Given, kernel: Callable = system.compiled) -> list[torch.Tensor]:
    with simulated(kernel=kernel), old_memory():
        found = [t.values if isinstance(t, Parts) else t for t in run(g)]
    return [t for t in found if t is not None]


def digest(tensors: list[torch.Tensor]) -> str:
    """Hash of the bytes of all results."""
    sha = hashlib.sha256()
    for t in tensors:
        sha.update(
            str(tuple(t.shape)).encode() + t.contiguous().view(torch.uint8).numpy().tobytes()
        )
    return sha.hexdigest()[:16]


CN, NC = Shape(19, 71, 4, "cn", BF16), Shape(9, 71, 2, "nc", FP32, "bf16x3", norm_weight=False)
#: Bytes of 4de81fba, whose kernels read such rows one element at a time and masked the last vector.
OF_MASKED_VECTORS = {
    (forward, CN): "067eaef2ecc5a8da",
    (forward, NC): "04f251906adce9df",
    (reduced, CN): "857127216544c381",
    (reduced, NC): "88b12f34c61c0de3",
    (projected_back, CN): "d33c29a779fbe1d6",
    (projected_back, NC): "a29966a8044c0a33",
}


def has_old_bytes(run: Callable, shape: Shape, kernel: Callable = system.compiled) -> bool:
    return digest(results(run, wild(shape), kernel)) == OF_MASKED_VECTORS[run, shape]


@simulated_test
@pytest.mark.parametrize(("run", "shape"), OF_MASKED_VECTORS)
def test_odd_rows_have_the_bytes_of_masked_vectors(run, shape):
    assert has_old_bytes(run, shape)


def with_numbers_behind(monkeypatch):
    """Copies have ones behind the last channel."""
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda t, by: pad(t, by, value=1.0))


def made_and_projected_at_once(monkeypatch):
    """Streams of padded operands are projected in the pass that makes them."""
    monkeypatch.setattr(launch, "project", plan_cache.launcher(planners._plan_project))


@simulated_test
@pytest.mark.parametrize("mutate", [with_numbers_behind, made_and_projected_at_once])
def test_padding_that_shows(monkeypatch, mutate):
    mutate(monkeypatch)
    assert not has_old_bytes(forward, CN)


@simulated_test
def test_the_mean_over_padding(tmp_path):
    """2 / K of the copies' K."""
    edit = "cutlass.Float32(tensors.size)", "cutlass.Float32(tensors.mX.shape[1])"
    kernel = kernels(system, tmp_path, "kernel_project_bwd_sm90", *edit)
    assert not has_old_bytes(projected_back, NC, kernel)
