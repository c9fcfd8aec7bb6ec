"""The digests on the pages: what each GPU model gave, and whether models agree."""

from __future__ import annotations

import pytest

from perf import verdict
from perf.digest import page
from perf.digest.cases import CASES
from tests.perf.digest.records import H100, H200, NAME, digested
from tests.perf.pages import row

ALL = len(CASES)


def everything(gpu: str, **more) -> list[dict]:
    return [digested(case.name, gpu, **more) for case in CASES]


def rendered(*records: dict) -> str:
    return "\n".join(page.render(list(records)))


def state(*records: dict) -> str:
    return "\n".join(page.state(list(records)))


def test_without_records_every_row_says_not_run():
    for case in CASES:
        assert row(rendered(), f"`{case.name}`")[1:] == ["not run"] * 3
    assert "contract id:" not in rendered()
    for name in ("H100", "H200"):
        assert row(state(), f"{name} taken")[1:] == [f"0 of {ALL}", "not run"]
    assert row(state(), "models against each other")[1:] == [f"0 of {ALL}", "not run"]


def test_one_model_is_no_agreement():
    records = everything(H200)
    assert row(rendered(*records), f"`{NAME}`")[1:] == ["not run", f"`{'d' * 12}`", "one model"]
    assert row(state(*records), "H200 taken")[1:] == [
        f"{ALL} of {ALL}",
        "NVIDIA H200, 0123456789, 2026-11-22",
    ]
    assert row(state(*records), "H100 taken")[1:] == [f"0 of {ALL}", "not run"]
    assert row(state(*records), "models against each other")[1:] == [f"0 of {ALL}", "not run"]
    again = everything(H200, date="2026-11-23T10:00:00+00:00")
    assert row(state(*records, *again), "models against each other")[2] == "not run"


def test_both_models_with_one_id_agree_or_differ():
    records = [*everything(H200), *everything(H100)]
    assert row(rendered(*records), f"`{NAME}`")[1:] == [f"`{'d' * 12}`"] * 2 + ["equal"]
    assert row(state(*records), "models against each other")[1:] == [f"{ALL} of {ALL}", "equal"]
    ids = row(rendered(*records), f"`linear/cute_sm90/sm_90a/{'ab' * 8}`")
    assert ids[1:] == ["8", "8"]
    records[0] = digested(digest="e")
    assert row(rendered(*records), f"`{NAME}`")[3] == "differs"
    out = row(state(*records), "models against each other")[1:]
    assert out == [f"{ALL} of {ALL}", f"differs: {NAME}"]
    assert verdict.agreed(records) == f"equal digests in {ALL - 1} of {ALL} cases, 1 differ"


@pytest.mark.parametrize("field", ["contract_id", "inputs"])
def test_other_ids_or_inputs_are_not_compared(field):
    records = [digested(), digested(gpu=H100, digest="e", **{field: "linear/cute_sm90/sm_90a/0"})]
    assert row(rendered(*records), f"`{NAME}`")[3] == "other contract ids"
    assert row(state(*records), "models against each other")[1:] == [f"0 of {ALL}", "not run"]


def test_one_card_that_contradicts_itself_differs():
    records = [digested(), digested(digest="e", date="2026-11-21T10:00:00+00:00")]
    for some in (records, records[::-1]):
        assert row(rendered(*some), f"`{NAME}`")[2:] == [f"`{'d' * 12}`", "differs"]


def test_what_a_cpu_gave_is_on_no_page():
    assert rendered(digested(gpu="none")) == rendered()
    assert state(digested(gpu="none")) == state()


def test_an_earlier_agreement_counts_when_a_later_toolchain_ran_on_one_model():
    later = {"date": "2026-11-25T10:00:00+00:00", "contract_id": "linear/cute_sm90/sm_90a/1"}
    records = [digested(), digested(gpu=H100), digested(digest="e", **later)]
    assert row(rendered(*records), f"`{NAME}`")[1:] == [
        f"`{'d' * 12}`",
        f"`{'e' * 12}`",
        "equal",
    ]
