"""``dsl.walk``: what the compiled backward loads for a ticket."""

from __future__ import annotations

import re

import pytest

from ptxsim import skips

kernel = skips.import_module("cute_kernels.sparse_attn.kernel_bwd_sm90")

from cute_kernels.sparse_attn import config  # noqa: E402
from verify import sass  # noqa: E402

cute, cutlass, walk = kernel.cute, kernel.cutlass, kernel.walk
#: The warp that loads, the thread that adds dQ, the consumers.
ROLES = 3


def loads() -> list[str]:
    """The loads from global memory in the PTX of one backward without bits."""
    kernel_config = config.configure("bf16", 64, "none", ordered=True)
    return re.findall(r"ld\.global\.\S*", sass.artefacts(lambda: kernel.build(kernel_config)).ptx)


@cute.jit
def number_by_number(self, ticket):
    """As if the tensor were aligned to its elements only."""
    start = self.ticket.iterator.toint() + cutlass.Int64(ticket) * 16
    source = cute.make_ptr(cutlass.Int32, start, cute.AddressSpace.gmem, assumed_align=4)
    return tuple(cute.make_tensor(source, cute.make_layout(4))[i] for i in range(4))


@pytest.mark.parametrize("mutant", [False, True])
def test_a_ticket_is_one_load_of_each_role(monkeypatch, mutant):
    if mutant:
        monkeypatch.setattr(walk.Lists, "column", number_by_number)
    data = loads()
    wide = [load for load in data if ".v4." in load]
    # Besides, each role has one for its entries, and those that add and multiply one for ranks.
    assert (len(wide) == ROLES and len(data) == 2 * ROLES + 2) is not mutant
