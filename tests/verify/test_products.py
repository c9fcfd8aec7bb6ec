"""R7 on small texts: batches and waits of WGMMA in SASS against those of the PTX."""

from __future__ import annotations

import pytest

from tests.verify.listings import listing, module
from verify import sass
from verify.products import serialised

FENCE = "wgmma.fence.sync.aligned;"
MMA = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, "
    "1, 1, 1, 0, 0;"
)
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
BATCH = (FENCE, MMA, MMA, MMA, COMMIT, WAIT)

ARRIVE = "WARPGROUP.ARRIVE"
PRODUCT, LAST = (f"HGMMA.64x8x16.F32.BF16 R24, gdesc[UR8], R24{end}" for end in ("", ", gsb0"))
DEPBAR = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
CODE = (ARRIVE, PRODUCT, PRODUCT, LAST, DEPBAR)
ALONE = (ARRIVE, LAST, DEPBAR) * 3


def findings(written, machine, name: str = "k") -> list[str]:
    code = sass.parse(listing(*machine, name=name))
    out = list(serialised(module(*written), code))
    assert all(f.rule == "R7" and f.where == name for f in out)
    return [f.text for f in out]


@pytest.mark.parametrize(
    ("written", "machine"),
    [
        ((), ()),
        (BATCH, CODE),
        (2 * BATCH, 2 * CODE),
        (BATCH, 4 * CODE),  # a loop unrolled
        (BATCH[:-1], CODE[:-1]),  # awaited elsewhere
        ((FENCE, MMA, COMMIT, WAIT), ALONE),  # one product a batch is what was written
    ],
)
def test_what_was_written_holds(written, machine):
    assert findings(written, machine) == []


def test_products_awaited_one_by_one_are_found():
    batches, waits = findings(BATCH, ALONE)
    assert batches.startswith("3 batches of 3 products, 1 of 3 in the PTX")
    assert waits.startswith("3 waits of 3 products, 1 of 3 in the PTX")
    assert len(findings(BATCH, ALONE * 2)) == 2


def test_one_batch_of_two_is_found():
    batches, waits = findings(2 * BATCH, (*CODE, *ALONE))
    assert batches.startswith("4 batches of 6 products, 2 of 6")
    assert waits.startswith("4 waits of 6")


@pytest.mark.parametrize("machine", [(*CODE, DEPBAR), (*CODE[:2], DEPBAR, *CODE[2:])])
def test_a_wait_too_many_is_found(machine):
    (out,) = findings(BATCH, machine)
    assert out.startswith("2 waits of 3 products, 1 of 3")


def test_products_of_another_kernel_do_not_count():
    assert findings(BATCH, CODE, "other") == ["3 products, none in the PTX"]
