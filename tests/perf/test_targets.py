"""Targets, bits and answers on the status page: verdicts that follow from the records alone."""

from __future__ import annotations

import pytest

from perf.attention import page as attention_page
from perf.attention import paged_page, soak_cases, soak_page
from perf.attention import targets as attention_targets
from perf.attention.cases import Case
from perf.core import models, sanitize
from perf.core.tables import commit_of, latest
from perf.digest import page as digest_page
from perf.digest.cases import CASES as DIGESTS
from perf.gemm import decode, decode_page
from perf.gemm import page as gemm_page
from perf.gemm import targets as gemm_targets
from perf.model import page as model_page
from perf.model import shapes
from perf.model.llama import Size
from perf.moe import page as moe_page
from perf.norm import page as norm_page
from perf.probes import page as probes_page
from perf.rl import page as rl_page
from perf.rl.size import CARD
from tests.perf.records import (
    FIRST,
    H100,
    H200,
    attention,
    bench,
    every_attention,
    forward,
    gemm,
    record,
)

TRAINING = [target.text for target in model_page.TARGETS]
GRAD, INFERENCE = (
    f"host time of one forward call, {mode}: <= {limit:g} us"
    for mode, limit in gemm_targets.HOST_TARGETS.items()
)


def told(page, records: list[dict]) -> dict[str, list[str]]:
    """Target -> measured, verdict and next step."""
    return {text: rest for text, *rest in page.target_rows(records)}


# ---- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "measured", "verdict", "step"),
    [
        (forward(0.96), "0.960x (lowest 0.960x)", "met", "none"),
        (forward(0.94, lm_head=0.93), "0.938x (lowest 0.930x)", "missed", "lm_head"),
        (forward(0.99, qkv=0.89), "0.969x (lowest 0.890x)", "missed", "qkv"),
        (forward(0.96)[:3], "not run (3 of 5 cases)", "not run", "bench gemm"),
    ],
)
def test_a_product_needs_all_five_shapes_the_mean_and_each(records, measured, verdict, step):
    *cells, then = told(gemm_page, records)[gemm_targets.TARGETS[0].text]
    assert cells == [measured, verdict] and step in then


def test_a_miss_at_the_floor_is_the_rivals():
    """Ours within a tenth of the floor, the rival at half of it: 2.3x is out of reach."""
    target, records = gemm_targets.TARGETS[1], []
    for shape, (m, _, _) in gemm_targets.SHAPES.items():
        records.append(gemm("fwd", shape, m, 100.0, {target.rival: 184.0}))
        records.append(gemm("fwd", shape, m, 184.0, {}, system=target.rival, tflops=424.0))
    _, verdict, step = told(gemm_page, records)[target.text]
    assert verdict == "missed" and step.startswith("none:")
    for item in records:
        item["floor_fraction"] = 0.89
    assert not told(gemm_page, records)[target.text][2].startswith("none:")


def test_host_targets_are_of_the_newest_record_also_if_a_model_has_it():
    old = gemm("fwd", "qkv", 4096, 1.0, {}, host_us={"grad": 14.0, "inference": 13.0})
    host = {"ours": 7.5, "torch": 13.0, "ours, launch": 4.0}
    fields = old | {"kernel": "model", "product": "host linear", "date": "2026-12-31"}
    new = [fields | {"system": system, "host_us": cost} for system, cost in host.items()]
    assert told(gemm_page, [old])[GRAD][:2] == ["14.0 us", "met"]
    assert told(gemm_page, [old])[INFERENCE][:2] == ["13.0 us", "missed"]
    for records in ([old, *new], [*new, old]):
        assert told(gemm_page, records)[INFERENCE][:2] == ["7.5 us; torch 13.0 us", "met"]
    earlier = [item | {"date": "2020-01-01"} for item in new]
    assert told(gemm_page, [old, *earlier])[INFERENCE][0] == "13.0 us"


def test_a_check_does_not_hide_a_time_but_a_failure_does():
    timed = gemm("fwd", "qkv", 4096, 100.0, {"cublas": 98.0})
    later = {k: v for k, v in timed.items() if k not in ("median_us", "ratio")}
    later["date"] = "2026-11-23T10:00:00+00:00"
    assert latest([timed, later], "gemm").ratio(("fwd", "qkv"), "cublas") == 0.98
    failed = latest([timed, later | {"status": "failed"}], "gemm")
    assert failed.get(("fwd", "qkv"))["status"] == "failed"
    assert failed.ratio(("fwd", "qkv"), "cublas") is None


# ---- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "verdict"), [(1.02, "met"), (1.031, "missed")])
def test_a_target_is_held_by_its_worst_case(ratio, verdict):
    full, size = attention_targets.TARGETS[0], ("full", 8192, 64, 16, 16)
    records = [r for r in every_attention(1.01) if r["shape"] != Case(*size).label]
    records.append(attention(size, rivals={"ours_unordered": 1000.0 / ratio}))
    measured, got, _ = told(attention_page, records)[full.text]
    assert got == verdict and measured.startswith(f"{ratio:.3f}x (") and "9 of 9" in measured
    some = [r for r in every_attention(1.0) if r["shape"].startswith("full/s8192/d128")]
    assert told(attention_page, some)[full.text][1] == "not run"
    some[0]["ratio"]["ours_unordered"] = 0.5
    assert told(attention_page, some)[full.text][1] == "missed"


def test_a_target_on_average_is_the_mean_of_all_its_cases():
    """One slow case is made up for; the target of each case says that it is slow."""
    mean = next(t for t in attention_targets.TARGETS if t.mean and t.which == "bwd")
    each = next(t for t in attention_targets.TARGETS if not t.mean and t.masks == mean.masks)
    one, all_slower = every_attention(1.0, "fa4"), every_attention(1 / 0.96, "fa4")
    next(r for r in one if r["shape"] == Case(*FIRST).label)["ratio"] = {"fa4": 0.9}
    for records, verdicts in ((one, ["met", "missed"]), (all_slower, ["missed", "met"])):
        text = told(attention_page, records)
        assert [text[mean.text][1], text[each.text][1]] == verdicts
    count = int(text[mean.text][0].split("; ")[1].split()[0])
    factor = told(attention_page, one)[mean.text][0].partition("x")[0]
    assert factor == f"{(1 / 0.9) ** (1 / count):.3f}"
    assert told(attention_page, one[:5])[mean.text][1] == "not run"


@pytest.mark.parametrize(
    ("start", "field", "held", "beyond"),
    [
        ("bwd, full, D = 128: ours >= 580", "tflops", 580.0, 579.0),
        ("the tensors of an order", "order_share", 0.019, 0.021),
        ("the table and the tickets of a pack", "table_share", 0.02, 0.021),
    ],
)
def test_rates_and_shares_are_held_by_the_worst(start, field, held, beyond):
    packs = [attention(size, system="ours_pack") for size in attention_targets.PACKS]
    records = packs if field == "table_share" else every_attention(1.0)
    for value, verdict in ((held, "met"), (beyond, "missed")):
        for r in records:
            r[field] = held
        next(r for r in records if "d128" in r["shape"])[field] = value
        text = told(attention_page, records)
        assert [cells[1] for name, cells in text.items() if name.startswith(start)] == [verdict]


def test_the_totals_of_a_soak_leave_the_controls_out():
    def soaked(case: soak_cases.Case, dq: int = 0) -> dict:
        counts = dict.fromkeys(case.outputs, 0) | {"dq": dq}
        graph = {"replays": 1000, "differing_bytes": counts}
        facts = {"repeats": case.repeats, "differing_bytes": counts, "graph": graph}
        return record("soak", kernel="attention") | case.items() | facts

    suite = [c for c in soak_cases.suite() if c.mask != soak_cases.PACK]
    ours = [c for c in suite if (c.dim, c.dtype, c.ordered) == (64, "fp16", True)]
    records = [*map(soaked, ours), *(soaked(c, 5) for c in suite if not c.ordered)]
    assert soak_page.totals(records) == (10_000, 10_000, 0)
    assert soak_page.totals([*records, soaked(ours[0], 7)])[2] == 14  # calls and replays
    assert soak_page.verdict([]) == soak_page.sanitized([]) == "not run"


def test_the_sanitizers_verdict_leaves_the_planted_error_out():
    errors = {"memcheck": 0, "synccheck": None, sanitize.PLANTED: 1}
    records = [record("sanitize", kernel="attention", case=c, errors=n) for c, n in errors.items()]
    assert soak_page.sanitized(records) == f"0 errors by 1 of {len(sanitize.TOOLS)} tools"
    records.append(records[0] | {"date": "2026-11-22", "errors": 3})
    assert soak_page.sanitized(records).startswith("3 errors")


# ---- paged caches, few rows, norms, mixtures ----------------------------------------------------


def paged(small: float, large: float, gpu: str = H100, **rivals: float) -> list[dict]:
    """Every size, ours at pages of 16 and of 256; a rival takes 100 us."""
    us = {"page 16": small, "page 256": large} | dict.fromkeys(paged_page.RIVALS, 100.0) | rivals
    return [
        bench(paged_page.KERNEL, *case, own, us, system=name, of_copy=90 / own, gpu=gpu)
        for case in (*map(paged_page.key, paged_page.SIZES), paged_page.mixed_key())
        for name, own in us.items()
    ]


ALONE, MANY, MIXED = "1x16384: >= 0.91x", "8 to 256 sequences: >= 1.00x", "mixed batch: >= 0.95x"
BANDWIDTH, SMALL = "8 to 256 sequences: >= 80%", "pages of 16: >= 0.95x"


@pytest.mark.parametrize(
    ("records", "missed"),
    [
        (paged(100, 100), []),
        *((paged(100, 100, **{name: 85.0}), [ALONE, MANY]) for name in paged_page.RIVALS),
        (paged(100, 100, fa4=85.0), [MIXED]),
        (paged(127, 120, **dict.fromkeys(paged_page.RIVALS, 120.0)), [BANDWIDTH, SMALL]),
        (paged(200, 200, H200), ["1x131072: at most 160 us", "32x4096: at most 148.5 us"]),
        (paged(211, 211, H100), ["1x131072: at most 210 us"]),
    ],
)
def test_the_fastest_rival_small_pages_and_the_cards_limit_count(records, missed):
    words = [(text, row[1]) for text, row in told(paged_page, records).items()]
    for start in missed:
        assert [word for text, word in words if text.startswith(start)] == ["missed"], start
    assert missed or {word for _, word in words} == {"met"}


def few_rows(ratio: float, share: float = 0.9) -> list[dict]:
    """Every case and system; cuBLAS takes ``ratio`` times as long as each other one."""
    others = {name: ratio if name == "cublas" else 1.0 for name in decode_page.SYSTEMS}
    return [
        bench("decode", case.product, case.label, 10.0, system=name, of_copy=share)
        | {"ratio": others}
        for case in decode.cases(["few", "middle", "dense"])
        for name in decode_page.SYSTEMS
        if case.m <= max(decode.ROWS) or name not in ("skinny", "fast")
    ]


@pytest.mark.parametrize(
    ("records", "missed", "not_run"),
    [
        (few_rows(1.1), 0, 0),
        (few_rows(1.1, 0.7), 1, 0),
        (few_rows(0.7), 5, 0),
        ([r for r in few_rows(1.1) if r["shape"] != "qkv/m13"], 0, 4),
    ],
)
def test_few_rows_need_every_case(records, missed, not_run):
    words = [row[1] for row in told(decode_page, records).values()]
    assert [words.count(word) for word in ("missed", "not run")] == [missed, not_run]
    assert words.count("met") == 8 - missed - not_run


def test_each_card_has_its_own_targets_of_norms():
    def norm(size, share, copy, liger, gpu) -> dict:
        ratio = {"copy": copy, "liger": liger}
        return bench("norm", "rms_norm fwd", size, 1.0, ratio, floor_fraction=share, gpu=gpu)

    h100 = [norm("8192x4096", 0.91, 0.99, 0.99, H100), norm("32768x2048", 0.95, 1.0, 1.02, H100)]
    first, second = (told(norm_page, r) for r in (h100, [norm("8192x4096", 0.88, 0.9, 1.04, H200)]))
    equal, large, liger = (
        f"rms_norm fwd: at least {text}"
        for text in (
            "90% of a copy of as many bytes",
            "90% of the bandwidth of a large copy",
            "1.00x liger",
        )
    )
    assert first[equal][:2] == ["99% to 100%, 2 sizes", "met"]
    assert second[equal][:2] == ["90% to 90%, 1 sizes", "met"]
    assert [first[large][1], second[large][1]] == ["met", "missed"]
    assert [first[liger][1], second[liger][1]] == ["missed", "met"]


def test_targets_of_mixtures_are_of_measured_cases():
    labels = set(moe_page.CASES)
    assert all(target.cases and set(target.cases) <= labels for target in moe_page.TARGETS)
    one = bench("moe", "fwd", "mixtral-8x7b/t1/zipf", 60.0, of_copy=0.8)
    assert moe_page.target_rows([one])[0][1:3] == ["80% to 80%, 1 sizes", "met"]


# ---- a whole model, an RL step ------------------------------------------------------------------


def model(product: str, shape: str, system: str = "ours", us: float = 1.0, rivals=None, **more):
    return bench("model", product, shape, us, rivals, system=system, model=Size().label, **more)


def training(**times: float) -> list[dict]:
    """Steps of the systems that were timed together."""
    return [model("training", "4x2048", name, us, times) for name, us in times.items()]


@pytest.mark.parametrize(
    ("ours", "compiled", "expected"),
    [
        (101.0, 84.0, ["met", "met"]),
        (103.0, 83.9, ["missed", "met"]),
        (90.0, 85, ["met", "missed"]),
    ],
)
def test_targets_of_a_model_are_times_of_training(ours, compiled, expected):
    records = training(torch=100.0, torch_compiled=80.0, ours=ours, ours_compiled=compiled)
    assert [told(model_page, records)[text][1] for text in TRAINING] == expected
    other = [r | {"model": "Llama 2048x2"} for r in records]
    assert told(model_page, other)[TRAINING[0]][1] == "not run"


def step(name: str, ours: float, differ: int) -> list[dict]:
    times = {"native": 4.0, "ours": ours}
    facts = {"tokens": 1000, "differ": differ}
    shape = CARD[name].label
    return [bench("rl", "step", shape, us, times, system=s, **facts) for s, us in times.items()]


@pytest.mark.parametrize(
    ("records", "verdicts"),
    [
        (step("0.5b", 4.2, 0), ["met", "not run", "met"]),
        (step("0.5b", 4.21, 0), ["missed", "not run", "met"]),
        (step("0.5b", 3.0, 7), ["met", "not run", "missed"]),
        (step("0.5b", 4.0, 1) + step("3b", 5.0, 2), ["met", "missed", "missed"]),
    ],
)
def test_targets_of_an_rl_step_are_its_time_and_its_bytes(records, verdicts):
    rows = rl_page.target_rows(records)
    assert [row[2] for row in rows] == verdicts
    differ = sum(r["differ"] for r in records if r["system"] == "ours")
    assert rows[-1][1] == f"{differ} of {500 * len(records)}"
    assert rl_page.bits_kept(records)[0][1].startswith(rows[-1][1])


# ---- bits, digests, answers ---------------------------------------------------------------------

REPLAYS = [model("replaying", f"{b}x{n}") for b, n in shapes.TIMED["replaying"]]


@pytest.mark.parametrize(
    ("page", "records", "of"),
    [
        (attention_page, every_attention(1.0), (56, 112)),
        (paged_page, paged(100, 100), (8, 8)),
        (decode_page, few_rows(1.1), (88, 88)),
        (model_page, [model("audit", shapes.AUDIT), *REPLAYS], (1 + len(REPLAYS),) * 2),
    ],
)
def test_broken_bits_are_counted_and_named(page, records, of):
    kept, cases = of
    assert page.bits_kept(records)[0][1] == f"kept in {kept} of {cases} cases"
    broken = next(r for r in records if r["system"] in ("ours", "page 256", "chain"))
    broken["bitwise"] = {"repeat": False}
    text = page.bits_kept(records)[0][1]
    assert text.startswith(f"kept in {kept - 1} of {cases} cases; broken in {broken['product']} ")


@pytest.mark.parametrize(
    ("commit", "dirty", "shown"),
    [("e77c02327c-dirty", None, "+"), ("e77c02327c", None, ""), ("e77c02327c00", True, "+")],
)
def test_a_commit_of_a_changed_tree_is_marked(commit, dirty, shown):
    assert commit_of({"commit": commit, "dirty": dirty}) == "e77c02327c" + shown


@pytest.mark.parametrize(
    ("gpu", "name"), [("NVIDIA H200 NVL", "H200"), (H100, "H100"), ("NVIDIA GH200 480GB", None)]
)
def test_a_model_is_told_by_its_word(gpu, name):
    assert models.model(gpu) == (name or gpu)


def digested(gpu: str = H200, digest: str = "d", case: str = DIGESTS[0].name, **more) -> dict:
    ids = {"contract_id": "linear/cute_sm90/sm_90a/0", "inputs": "i"} | more
    return record("digest", case=case, gpu=gpu, digest=digest * 64, **ids)


LATER = {"date": "2026-11-25T10:00:00+00:00", "contract_id": "linear/cute_sm90/sm_90a/1"}


@pytest.mark.parametrize(
    ("records", "cells"),
    [
        ([], ["not run", "not run", "not run"]),
        ([digested("none")], ["not run", "not run", "not run"]),
        ([digested()], ["not run", "d" * 12, "one model"]),
        ([digested(), digested(H100)], ["d" * 12, "d" * 12, "equal"]),
        ([digested(), digested(H100, "e")], ["e" * 12, "d" * 12, "differs"]),
        ([digested(), digested(H100, "e", inputs="j")], ["e" * 12, "d" * 12, "other contract ids"]),
        (
            [digested(), digested(H100, "e", contract_id="x")],
            ["e" * 12, "d" * 12, "other contract ids"],
        ),
        ([digested(), digested(digest="e", date="2026-11-20")], ["not run", "d" * 12, "differs"]),
        # An earlier agreement counts when a later toolchain ran on one model.
        (
            [digested(), digested(H100), digested(digest="e", **LATER)],
            ["d" * 12, "e" * 12, "equal"],
        ),
    ],
)
def test_digests_of_equal_ids_and_inputs_are_compared(records, cells):
    for some in (records, records[::-1]):
        assert digest_page.rows(some)[1][0][1:] == cells


def probe(verdict: str, outputs: int, **more) -> dict:
    facts = {"probe": "width", "case": "answer", "verdict": verdict, "outputs": outputs}
    return record("probe", differ=0, **facts, **more)


@pytest.mark.parametrize(
    ("records", "answer", "step"),
    [
        ([], "not run", "perf probe width"),
        ([probe("yes", 1000)], "too few outputs", "none"),
        ([probe("yes", 1000), probe("yes", 2 * 10**7)], "yes (0 of 20,000,000 outputs dif", "none"),
        ([probe("yes", 10**8, extreme={"verdict": "no"})], "operands: no", "the rule for those"),
        ([probe("failed", 0, why="boom")], "failed: boom", "none"),
        ([probe("yes", 10**8, costs={"16": 0.02, "4": 0.25})], "+25.0%, leaf of 16", "none"),
    ],
)
def test_an_answer_needs_enough_outputs_and_tells_extremes_apart(records, answer, step):
    head, (row, *_) = probes_page.rows(records)
    cells = dict(zip(head, row, strict=True))
    assert answer in cells["answer"] and step in cells["next step"]
