"""Results at awkward sizes, forward and backward, follow nothing that memory held before.

tests/test_option_table.py has every option of every op; these are sizes of zero, tails of tiles,
and rows that take part in nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cute_kernels import arch
from cute_kernels.gemm import cpu as products
from cute_kernels.moe import cpu as experts
from ptxsim.skips import requires_core
from tests.contract import ContractViolation
from tests.old_memory import in_any_memory, old_memory
from tests.old_memory_cases import BF16, CASES, INT32
from tests.option_table import backends

ALL = [(system, name) for system, cases in CASES.items() for name in cases]


@pytest.mark.parametrize(("system", "name"), ALL)
def test_cpu(system, name):
    in_any_memory(CASES[system][name])


@pytest.mark.nightly
@pytest.mark.sim
@requires_core
@pytest.mark.parametrize(("system", "name"), ALL)
@pytest.mark.parametrize("backend", [arch.CUTE_SM90, arch.TRITON])
def test_simulated(backend, system, name):
    if backend == arch.CUTE_SM90 and system in ("linear_attn", "rowwise"):
        pytest.skip("no SM90 kernels")
    simulated = {arch.CUTE_SM90: backends.sm90, arch.TRITON: backends.triton}[backend]
    with simulated(system):
        in_any_memory(CASES[system][name])


# ---- mutants -------------------------------------------------------------------------------------


def _without_a_row(function: Callable) -> Callable:
    """The launcher, but the last row of its result is what memory held."""

    def mutant(*args, **options):
        out = function(*args, **options).clone()
        out[-1] = torch.empty_like(out[-1])
        return out

    return mutant


@pytest.mark.parametrize(
    ("module", "function", "system", "name"),
    [
        (products, "gemm", "gemm", "tails"),
        (experts, "grouped_gemm", "moe", "empty experts"),
        (experts, "gather", "moe", "strays"),
        (experts, "combine", "moe", "strays"),
    ],
)
def test_a_row_that_is_not_written_is_found(module, function, system, name, monkeypatch):
    monkeypatch.setattr(module, function, _without_a_row(getattr(module, function)))
    with pytest.raises(ContractViolation, match="old memory"):
        in_any_memory(CASES[system][name])


def test_memory_of_every_kind_is_filled():
    x = torch.zeros(2, 3)
    for value, integer in ((torch.nan, torch.iinfo(INT32).min // 3), (1000.0, 1000)):
        with old_memory(value):
            for dtype, held in ((BF16, value), (INT32, integer), (torch.bool, value == value)):
                for t in (
                    torch.empty(2, 3, dtype=dtype),
                    torch.empty_like(x, dtype=dtype),
                    torch.empty_strided((2, 3), (1, 2), dtype=dtype),
                    x.new_empty(2, 3, dtype=dtype),
                    x.new_empty_strided((2, 3), (1, 2), dtype=dtype),
                ):
                    want = torch.full((2, 3), held, dtype=dtype)
                    torch.testing.assert_close(t, want, rtol=0, atol=0, equal_nan=True)
