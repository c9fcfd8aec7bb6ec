"""Digests: what each GPU model gave, and whether models agree."""

from __future__ import annotations

import pytest

from perf import report
from perf.digest import page
from perf.digest.cases import CASES
from tests.perf.digest.records import H100, H200, NAME, digested

ALL = len(CASES)


def everything(gpu: str, **more) -> list[dict]:
    return [digested(case.name, gpu, **more) for case in CASES]


def shown(*records: dict, case: str = NAME) -> list[str]:
    """Digests of a case and the verdict."""
    _, rows = page.rows(list(records))
    return next(cells for name, *cells in rows if name == case)


def test_without_records_every_row_says_not_run():
    for case in CASES:
        assert shown(case=case.name) == ["not run"] * 3
    assert report.agreed([]) == "not run"


def test_one_model_is_no_agreement():
    records = everything(H200)
    assert shown(*records) == ["not run", "d" * 12, "one model"]
    again = everything(H200, date="2026-11-23T10:00:00+00:00")
    assert report.agreed(records) == report.agreed([*records, *again]) == "not run"


def test_both_models_with_one_id_agree_or_differ():
    records = [*everything(H200), *everything(H100)]
    assert shown(*records) == ["d" * 12] * 2 + ["equal"]
    assert report.agreed(records) == f"equal digests in {ALL} of {ALL} cases"
    records[0] = digested(digest="e")
    assert shown(*records)[2] == "differs"
    assert report.agreed(records) == f"equal digests in {ALL - 1} of {ALL} cases, 1 differ"


@pytest.mark.parametrize("field", ["contract_id", "inputs"])
def test_other_ids_or_inputs_are_not_compared(field):
    records = [digested(), digested(gpu=H100, digest="e", **{field: "linear/cute_sm90/sm_90a/0"})]
    assert shown(*records)[2] == "other contract ids"
    assert report.agreed(records) == "not run"


def test_one_card_that_contradicts_itself_differs():
    records = [digested(), digested(digest="e", date="2026-11-21T10:00:00+00:00")]
    for some in (records, records[::-1]):
        assert shown(*some)[1:] == ["d" * 12, "differs"]


def test_what_a_cpu_gave_does_not_count():
    assert page.rows([digested(gpu="none")]) == page.rows([])


def test_an_earlier_agreement_counts_when_a_later_toolchain_ran_on_one_model():
    later = {"date": "2026-11-25T10:00:00+00:00", "contract_id": "linear/cute_sm90/sm_90a/1"}
    records = [digested(), digested(gpu=H100), digested(digest="e", **later)]
    assert shown(*records) == ["d" * 12, "e" * 12, "equal"]
