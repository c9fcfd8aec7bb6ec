"""The public op on the Triton kernels without a GPU, mutated copies, their order in numpy.

``through()`` sends ``block_sparse_attention`` to the Triton launchers for CPU tensors; the launches
themselves go to Triton's interpreter or, inside ``triton_harness.simulated``, to ptxsim.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import numpy as np
import torch

import cute_kernels.sparse_attn.triton as package
from cute_kernels.runtime import dispatch
from cute_kernels.schedulers.order.schedule import Schedule
from cute_kernels.sparse_attn.triton import launch as triton_launch
from tests import triton_copies
from tests.triton_in_numpy import product

F32 = np.float32
LOG2E, LN2 = F32(math.log2(math.e)), F32(math.log(2))


@contextlib.contextmanager
def through(launch: ModuleType = triton_launch, **options: bool) -> Iterator[None]:
    """While it lasts, the op runs on ``launch``; options: ``interpret``."""

    def launcher(op, device, dtype):
        name = "backward" if op.endswith("_backward") else "forward"
        return functools.partial(getattr(launch, name), **options)

    with mock.patch.object(dispatch, "launcher", launcher):
        yield


copy_of = functools.partial(triton_copies.copy_of, package, beside=("kernel_softmax",))


#: The plan's steps by head size: keys of the forward, query rows of dK and dV, keys of dQ.
STEPS = {64: (64, 32, 64), 192: (32, 16, 32), 256: (32, 16, 16)}


class ByHand:
    """One attention without softcap, in bf16, as the kernels' docstring spells it, in numpy.

    A product here is the one that Triton's interpreter takes, so that bytes can be compared.
    """

    def __init__(self, q, k, v, allowed, scale: float):
        self.sizes = q.shape[1], k.shape[1]
        self.group, self.steps = q.shape[2] // k.shape[2], STEPS[q.shape[3]]
        self.q, self.k, self.v = (_blocks(t) for t in (q, k, v))
        m, n = self.q.shape[2], self.k.shape[2]
        dense = allowed.expand(q.shape[0], q.shape[2], *self.sizes)
        pad = (0, n - self.sizes[1], 0, m - self.sizes[0])
        self.allowed = torch.nn.functional.pad(dense, pad).numpy()
        self.scale, self.factor = F32(scale), F32(scale * math.log2(math.e))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse; a block without an allowed pair is not visited."""
        step, width = self.steps[0], self.v.shape[3]
        lse = np.zeros(self.q.shape[:3], F32)
        out = np.zeros((*lse.shape, width), F32)
        for b, h, m in np.ndindex(*self.q.shape[:2], self.q.shape[2] // 128):
            rows = np.s_[m * 128 : m * 128 + 128]
            top = np.full(128, -np.inf, F32)
            total, acc = np.zeros(128, F32), np.zeros((128, width), F32)
            for index in range(0, self.k.shape[2], step):
                if not self.allowed[
                    b, h, rows, index // 128 * 128 : index // 128 * 128 + 128
                ].any():
                    continue
                cols = np.s_[index : index + step]
                allowed = self.allowed[b, h, rows, cols]
                s = product(self.q[b, h, rows], self.k[b, h // self.group, cols].T)
                above = np.maximum(top, np.where(allowed, s, F32(-np.inf)).max(1) * self.factor)
                base = np.where(above == -np.inf, F32(0), above)
                p = np.where(allowed, np.exp2(s * self.factor - base[:, None]), F32(0))
                shrink = np.exp2(top - base)
                total = total * shrink + p.sum(1)
                part = product(_rounded(p), self.v[b, h // self.group, cols])
                acc, top = part + acc * shrink[:, None], above
            with np.errstate(divide="ignore", invalid="ignore"):
                out[b, h, rows] = np.where(acc == 0, F32(0), acc / total[:, None])
                lse[b, h, rows] = (top + np.log2(total)) * LN2
        self.out, self.lse = _rounded(out), lse
        size = self.sizes[0]
        return self._stored(out, size), torch.from_numpy(lse[:, :, :size].copy())

    def backward(self, dout, schedule: Schedule) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv in fp32 [B, S, H, D], visits and ranks read off the schedule's tickets."""
        self.dout = _blocks(dout)
        self.delta = (self.out * self.dout).sum(3)
        dq, dk, dv = np.zeros_like(self.q), np.zeros_like(self.k), np.zeros_like(self.v)
        _, rows_of_step, keys_of_step = self.steps
        heads, per = self.q.shape[1], self.q.shape[0] * self.q.shape[1] // schedule.heads
        writers: dict[tuple, dict[int, int]] = {}
        for ticket, n, visits in sorted(schedule.tickets(), key=lambda t: t[0]):
            for (m, _, rank), inner in itertools.product(visits, range(per)):
                b, h = divmod(ticket * per + inner, heads)
                kv, cols = h // self.group, np.s_[n * 128 : n * 128 + 128]
                writers.setdefault((b, h, m), {})[rank] = n
                for index in range(m * 128, m * 128 + 128, rows_of_step):
                    rows = np.s_[index : index + rows_of_step]
                    p, ds = self._slopes(b, h, rows, cols, flip=True)
                    dv[b, kv, cols] = product(p, self.dout[b, h, rows]) + dv[b, kv, cols]
                    dk[b, kv, cols] = product(ds, self.q[b, h, rows]) + dk[b, kv, cols]
        for (b, h, m), out in writers.items():
            rows = np.s_[m * 128 : m * 128 + 128]
            for rank, index in itertools.product(sorted(out), range(0, 128, keys_of_step)):
                cols = np.s_[out[rank] * 128 + index : out[rank] * 128 + index + keys_of_step]
                _, ds = self._slopes(b, h, rows, cols, flip=False)
                dq[b, h, rows] = product(ds, self.k[b, h // self.group, cols]) + dq[b, h, rows]
        q_len, kv_len = self.sizes
        return (
            self._stored(dq * self.scale, q_len),
            self._stored(dk * self.scale, kv_len),
            self._stored(dv, kv_len),
        )

    def _slopes(self, b: int, h: int, rows, cols, flip: bool) -> tuple[np.ndarray, np.ndarray]:
        """P and dS of a tile; ``flip``: keys are rows."""
        x, y = self.q[b, h, rows], self.k[b, h // self.group, cols]
        g, v = self.dout[b, h, rows], self.v[b, h // self.group, cols]
        allowed, shift = self.allowed[b, h, rows, cols], -(self.lse[b, h, rows] * LOG2E)[:, None]
        delta = self.delta[b, h, rows, None]
        if flip:
            x, y, g, v = y, x, v, g
            allowed, shift, delta = allowed.T, shift.T, delta.T
        p = np.where(allowed, np.exp2(product(x, y.T) * self.factor + shift), F32(0))
        ds = np.where(allowed, p * (product(g, v.T) - delta), F32(0))
        return _rounded(p), _rounded(ds)

    def _stored(self, blocks: np.ndarray, size: int) -> torch.Tensor:
        return torch.from_numpy(blocks[:, :, :size].copy()).transpose(1, 2)


def _rounded(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()


def _blocks(t: torch.Tensor) -> np.ndarray:
    """[B, S, H, D] -> fp32 [B, H, whole blocks, D], zero rows at the end."""
    t = t.detach().float().transpose(1, 2)
    return torch.nn.functional.pad(t, (0, 0, 0, -t.shape[2] % 128)).contiguous().numpy()
