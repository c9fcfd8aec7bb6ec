"""What the SM90 tests of logp compare: a call of the launcher, and its oracle with the same 2^y."""

from __future__ import annotations

import contextlib
import ctypes
from typing import NamedTuple

import numpy as np
import pytest
import torch

from cute_kernels.logp import cpu, exact, launch, op
from cute_kernels.logp.tensors import Head, Logits, Rows, Upstream
from tests import contract
from tests.kernels.operands import operand
from tests.oracles import gemm as reference

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Case(NamedTuple):
    """Operands of one call."""

    hidden: torch.Tensor
    head: Head
    rows: Rows

    @property
    def logits(self) -> torch.Tensor:
        """fp32 [T, V] in the head's order, exact within a group of 16, with the bias."""
        head = self.head
        product = reference.tree if head.order == "tree" else reference.chain
        z = product(self.hidden, head.weight, None)
        return z.float() if head.bias is None else z.float() + head.bias.float()

    @property
    def place(self) -> Logits:
        return Logits(self.head.start, self.head.vocab, self.head.softcap)


def case(chosen, tokens: int, vocab: int, width: int, seed: int = 0) -> Case:
    """Random operands of a configuration; some padding, one masked and one NaN token."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[chosen.dtype]
    hidden = operand(tokens, width, dtype, "k", seed=seed + 1)
    weight = operand(vocab, width, dtype, "k", seed=seed + 2)
    bias = torch.randn(vocab, generator=generator).to(dtype) if chosen.bias else None
    padding = min(5, vocab - 1)
    target = torch.randint(0, vocab - padding, (tokens,), generator=generator)
    if tokens > 3:
        target[1] = -100
        hidden[1] = torch.nan
        hidden[3] = torch.nan
    temperatures = torch.rand(tokens, generator=generator) + 0.5
    softcap = 7.0 if chosen.softcap else 0.0
    rows = op.rows_of(target, temperatures, 1.0, -100, vocab - padding)
    return Case(hidden, Head(weight, bias, 0, vocab - padding, softcap, chosen.order), rows)


def upstream(given: Case, states: torch.Tensor, entropy: bool, seed: int = 7) -> Upstream:
    """Random gradients of a call's results."""
    _, lse2, made = exact.finish(states, given.rows)
    generator = torch.Generator().manual_seed(seed)
    d_logp, d_entropy = torch.randn(2, len(lse2), generator=generator)
    return op.upstream_of(d_logp, d_entropy if entropy else None, given.rows, lse2, made)


_LIBM = ctypes.CDLL("libm.so.6")
_LIBM.exp2f.restype, _LIBM.exp2f.argtypes = ctypes.c_float, [ctypes.c_float]
_EXP2F = np.frompyfunc(_LIBM.exp2f, 1, 1)


def simulated_exp2(y: torch.Tensor) -> torch.Tensor:
    """2^y of the C library, and nothing below 2^-126: the simulator's ``ex2.approx.ftz``."""
    value = torch.from_numpy(_EXP2F(y.numpy()).astype(np.float32))
    value = torch.where(value < 2.0**-126, 0.0, value)
    return torch.where(y.isnan(), torch.nan, value)


@contextlib.contextmanager
def same_exp2(monkeypatch):
    """Inside, the CPU backend's 2^y is the simulator's."""
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "exp2", simulated_exp2)
        yield


def states_oracle(given: Case, entropy: bool) -> torch.Tensor:
    """int64 [T, C]: the CPU's units and integers of the exact logits."""
    return exact.merge(cpu.states_of_logits(given.logits, given.place, given.rows, entropy))


def gradients_oracle(given: Case, of: Upstream) -> torch.Tensor:
    """[T, V]: the CPU's elements of the exact logits."""
    dtype = given.hidden.dtype
    return cpu.gradients_of_logits(given.logits, given.place, given.rows, of, dtype)


def states_of(given: Case, entropy: bool) -> torch.Tensor:
    """int64 [T, C] of the launcher, merged."""
    return exact.merge(launch.states(given.hidden, given.head, given.rows, entropy))


def same_states(got: torch.Tensor, want: torch.Tensor) -> bool:
    """All columns; of a row that has seen NaN the sums say nothing."""
    known = want[:, 0] < exact.LOST
    return contract.same_bytes(got[:, 0], want[:, 0]) and contract.same_bytes(
        got[known], want[known]
    )


def every(configs, often):
    """Nightly: fp16, and what ``often`` leaves out."""
    for chosen in configs:
        label = "-".join(map(str, vars(chosen).values()))
        marks = () if chosen.dtype == "bf16" and often(chosen) else pytest.mark.nightly
        yield pytest.param(chosen, id=label, marks=marks)
