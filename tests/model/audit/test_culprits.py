"""A planted culprit is the one that is named; a clean model has none; a broken audit is noticed."""

from __future__ import annotations

import functools

import pytest
import torch

import cute_kernels as ck
from cute_kernels.model.audit import cases, checks, compare, gradients, probe, trace
from cute_kernels.model.audit.probe import ROW
from cute_kernels.model.audit.trace import Entry, Table
from cute_kernels.model.observe import rows
from tests.contract import bits
from tests.model.audit import planted

SEQUENCES = planted.sequences()
FORWARD = [
    "repeat", "batch", "compositions", "left_padding", "right_padding", "chunks", "decode",
]  # fmt: skip


def audit(model, *transforms, **options):
    return ck.audit(model, SEQUENCES, transforms=transforms or None, **options)


def named(report) -> list[tuple[str, str, str]]:
    return [(one.module, one.kind, one.transform) for one in report.findings]


def test_a_clean_model_differs_nowhere():
    report = audit(planted.clean())
    assert report.ok and report.first is None and not report.findings and not report.victims
    assert tuple(report.ran) == (*FORWARD, "gradient_repeat", "micro_batches")
    assert report.skipped == {"compile": "compile=False"} and not report.unfollowed
    # 12 passes of 19 tokens through 18 followed calls with rows: one of each module and the root
    assert report.differing == 0 and report.rows > 12 * 19 * 15 and report.gradients == 3 * 5
    assert str(report).startswith("0 differing rows of ")


#: Fault -> (where, the transforms that show it).
PLANTED = {
    "LanesByRows": ("blocks.1.norm", {*FORWARD[1:]}),
    "LastColumn": ("blocks.0.norm", {"batch", "decode"}),
    "MinusZero": ("blocks.0.norm", {"batch", "decode"}),
    "SplitByRows": ("blocks.1.up", {*FORWARD[1:]}),
    "AnyOrder": ("blocks.1.down", {*FORWARD}),
    "DecodePath": ("blocks.1.down", {"chunks", "decode"}),
    "PaddingLeak": ("blocks.0.mix", {"left_padding", "chunks", "decode"}),
    "NeighbourLeak": ("blocks.1.mix", {"batch", "compositions"}),
}
#: Those of which a few transforms are run: the others pass over what they spoil.
_FEW = ("LastColumn", "MinusZero", "NeighbourLeak")


@pytest.mark.parametrize("fault", PLANTED)
def test_the_planted_culprit_is_named(fault):
    place, shown = PLANTED[fault]
    report = audit(
        planted.spoilt(place, fault), *(("repeat", *shown) if fault in _FEW else FORWARD)
    )
    assert not report.ok
    assert {(module, kind) for module, kind, _ in named(report)} == {(place, fault)}
    assert {transform for *_, transform in named(report)} == shown
    assert all(
        0 < one.bytes <= one.of_bytes and 0 < one.rows <= one.of_rows for one in report.findings
    )
    victims = {victim.module for victim in report.victims}
    assert (place not in victims or fault == "AnyOrder") and "blocks.0.norm" not in victims
    first = report.first
    assert fault != "AnyOrder" or (first.transform == "repeat" and "randperm" in first.ops)


def test_the_first_difference_is_the_one_that_a_look_by_hand_finds():
    model = planted.spoilt("blocks.0.norm", "LanesByRows")
    one = audit(model, "batch").first
    norm, rows_seen = model.blocks[0].norm, []
    handle = norm.register_forward_hook(lambda m, args, out: rows_seen.append(out))
    with torch.no_grad():
        for ids in SEQUENCES:
            model(ids[None], position_ids=torch.arange(len(ids))[None])
        width = max(map(len, SEQUENCES))
        padded = torch.stack([torch.nn.functional.pad(s, (0, width - len(s))) for s in SEQUENCES])
        positions = torch.arange(width).expand(3, width)
        model(padded, position_ids=positions)
    handle.remove()
    *alone, batch = rows_seen
    where = [
        (s, int(t), int(c))
        for s, ours in enumerate(alone)
        for t, c in (bits(ours[0]) != bits(batch[s, : ours.shape[1]])).nonzero()
    ]
    s, t, c = min(where)
    assert one.first == (s, t, c)
    assert one.want == f"0x{int(bits(alone[s][0, t, c])) & 0xFFFFFFFF:08x}"
    assert one.got == f"0x{int(bits(batch[s, t, c])) & 0xFFFFFFFF:08x}"
    assert one.rows == len({place[:2] for place in where})
    unlike = [
        (bits(ours[0]).view(torch.uint8) != bits(batch[s, : ours.shape[1]]).view(torch.uint8)).sum()
        for s, ours in enumerate(alone)
    ]
    assert one.bytes == sum(map(int, unlike)) and one.of_bytes == 19 * 4 * planted.WIDTH
    assert one.ops[:2] == ("mul", "add") and one.case == "all in one batch"


def test_what_a_container_does_between_its_children_is_its_own():
    report = audit(planted.clean(planted.fault("Functional")), "batch", "decode")
    assert {one.name for one in report.findings} == {"blocks.1"}
    assert {"blocks.1.down", "head", ""} <= {victim.module for victim in report.victims}


def test_calls_and_culprits_are_told_apart_in_their_order():
    report = audit(planted.clean(planted.SharedNorm), "batch")
    assert [one.name for one in report.findings] == ["blocks.1.norm (call 2)"]
    model = planted.spoil(planted.spoilt_norm(), "blocks.0.norm", "LanesByRows")
    assert audit(model, "batch").findings[0].module == "blocks.0.norm"


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("SplitGradient", {"micro_batches"}),
        ("RandomGradient", {"gradient_repeat", "micro_batches"}),
    ],
)
def test_a_gradient_that_follows_the_cut_is_named(fault, shown):
    report = audit(planted.spoilt("blocks.0.up", fault), "gradient_repeat", "micro_batches")
    gradients_named = {(one.name, one.kind, one.transform) for one in report.findings}
    assert gradients_named == {("blocks.0.up.main_grad", fault, transform) for transform in shown}
    assert len(report.first.first) == 2 and report.first.want != report.first.got


def test_gradients_come_in_backward_order_and_are_put_back():
    model = planted.spoilt("blocks.0.up", "RandomGradient")
    down = planted.spoil(model, "blocks.1.down", "RandomGradient").blocks[1].down
    held = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = held[name]
    down.main_grad.fill_(7.0)
    names = [one.name for one in audit(model, "gradient_repeat").findings]
    assert names == ["blocks.1.down.main_grad", "blocks.0.up.main_grad"]
    assert all(p.grad is held[name] for name, p in model.named_parameters())
    assert (down.main_grad == 7.0).all()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_no_hook_is_left_after_an_error():
    class Fails(planted.Norm):
        def forward(self, x):
            if x.shape[0] == 5:
                raise RuntimeError("the model's own error")
            return super().forward(x)

    model = planted.spoilt("blocks.1.norm", Fails)
    with pytest.raises(RuntimeError, match="the model's own error"):
        audit(model, "compositions")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_compiled_outputs_are_compared_with_eager_ones(monkeypatch):
    """dynamo's graphs, run as they are: what the compiler behind it does is not this test's."""
    graphs = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", graphs)
    torch._dynamo.reset()
    report = audit(planted.spoilt("blocks.1.down", "Compiled"), "repeat", compile=True)
    assert named(report) == [("", "Model", "compile")] and report.first.name == "(the model)"
    torch._dynamo.reset()
    sound = ck.audit(_plain(), drawn(5, 5), transforms=["compile"])
    assert sound.ok and sound.rows == 10


def drawn(*lengths: int) -> list[torch.Tensor]:
    """Of a vocabulary of 50."""
    return [ids % 50 for ids in planted.sequences(*lengths)]


def _plain() -> torch.nn.Module:
    torch.manual_seed(0)
    return (
        torch.nn.Sequential(torch.nn.Embedding(50, 16), planted.Doubled())
        .eval()
        .requires_grad_(False)
    )


def test_a_module_without_the_arguments_of_a_causal_lm():
    report = ck.audit(_plain(), drawn(5, 3))
    assert report.ok and set(report.ran) == {"repeat", "batch", "compositions", "right_padding"}
    assert report.skipped["left_padding"] == "forward takes no attention_mask"
    assert "past_key_values" in report.skipped["decode"]
    assert "requires a gradient" in report.skipped["micro_batches"]


def test_one_sequence_alone_is_no_batch():
    report = ck.audit(planted.clean(), planted.sequences(6), gradients=False)
    assert not report.ok and report.verdict == "incomplete" and "batch" in report.skipped
    assert str(report).startswith("incomplete: batch not run (there is one sequence); 0 differing")
    assert ck.audit(planted.clean(), planted.sequences(6), transforms=["repeat"]).ok
    spoilt = planted.spoilt_norm()
    assert not ck.audit(spoilt, planted.sequences(6), transforms=["compositions"]).ok


class Both(torch.nn.Module):
    """Each row sees all of its sequence: no causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.pool = planted.Doubled()

    def forward(self, ids):
        x = self.embed(ids)
        total = x[:, 0]
        for column in x.unbind(1)[1:]:
            total = total + column
        return x + self.pool(total)[:, None]


def test_a_model_that_looks_back_and_forth_is_not_padded():
    torch.manual_seed(0)
    report = ck.audit(Both().eval(), drawn(5, 3))
    assert report.verdict == "incomplete" and set(report.ran) == {"repeat", "compositions"}
    assert "behind it" in report.skipped["right_padding"] and "behind it" in report.skipped["batch"]
    assert report.unfollowed == ("pool",)


# ---- mutants of the audit itself ----------------------------------------------------------------


def of_runs_alone(broken):
    """A mutant of `rows.rows` in the runs; the probe stays whole."""

    def mutant(real):
        def rows_of(t, layout, shape, where):
            probing = shape == probe.GRIDS[0]
            return (real if probing else functools.partial(broken, real))(t, layout, shape, where)

        return rows_of

    return mutant


@of_runs_alone
def no_last_column(real, t, layout, shape, where):
    data = real(t, layout, shape, where)
    return None if data is None else data[:, : -t.element_size()].contiguous()


@of_runs_alone
def next_row(real, t, layout, shape, where):
    return real(t, layout, shape, (where + 1) % (shape[0] * shape[1]))


@of_runs_alone
def transposed(real, t, layout, shape, where):
    return real(t, layout, shape, where % shape[0] * shape[1] + where // shape[0])


def no_signs(real):
    """Equates -0 and +0."""
    return lambda data, dtype: real((data.view(dtype) + 0.0).view(torch.uint8), dtype)


def inputs_ignored(real):
    return lambda want, got, *rest: real(Entry(outs=want.outs), Entry(outs=got.outs), *rest)


def padded_on_the_right(real):
    return lambda problem, members, left=False, extra_columns=0: real(
        problem, members, False, extra_columns
    )


def all_at_once(real):
    def cuts(problem, transform):
        (whole,) = real(problem, "gradient_repeat").values()
        return dict.fromkeys(real(problem, transform), whole)

    return cuts


def planted_in(fault: str):
    return functools.partial(test_the_planted_culprit_is_named, fault)


a_container = test_what_a_container_does_between_its_children_is_its_own
a_split_gradient = functools.partial(
    test_a_gradient_that_follows_the_cut_is_named, "SplitGradient", {"micro_batches"}
)
#: What is broken -> (where, name, what it becomes, the test above that fails then).
MUTANTS = {
    "no last column": (rows, "rows", no_last_column, planted_in("LastColumn")),
    "next row": (rows, "rows", next_row, planted_in("LanesByRows")),
    "transposed": (rows, "rows", transposed, test_a_clean_model_differs_nowhere),
    "no signs": (rows, "digest", no_signs, planted_in("MinusZero")),
    "constant": (
        rows,
        "digest",
        lambda real: lambda data, dtype: torch.zeros_like(real(data, dtype)),
        planted_in("NeighbourLeak"),
    ),
    "own row only": (
        compare,
        "spread",
        lambda real: lambda mask, scope, starts: mask,
        planted_in("LastColumn"),
    ),
    "nothing inside": (
        compare,
        "_judge",
        lambda real: lambda a, b, inside, *rest: real(a, b, torch.zeros_like(inside), *rest),
        a_container,
    ),
    "inputs ignored": (compare, "_judge", inputs_ignored, a_container),
    "padding on the right": (cases, "grid", padded_on_the_right, planted_in("PaddingLeak")),
    "alone again": (
        cases,
        "cases",
        lambda real: lambda problem, transform: [cases.alone(problem, transform)],
        a_container,
    ),
    "all at once": (gradients, "cuts", all_at_once, a_split_gradient),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_audit_is_killed(monkeypatch, mutant):
    module, name, change, test = MUTANTS[mutant]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    with pytest.raises(AssertionError):
        test()


def test_inputs_are_read_before_a_module_writes_to_them(monkeypatch):
    """``Doubled`` writes to its input: read afterwards, its spoilt output would be its input."""
    model = planted.spoilt("blocks.0.doubled", "Spoils")
    assert audit(model, "batch").first.module == "blocks.0.doubled"
    real = trace.Recorder.before, trace.Recorder.after

    def late_before(self, key, module, args, kwargs):
        self.entries.setdefault(key, Entry())
        self.late = getattr(self, "late", {}) | {key: (module, args, kwargs)}

    def late_after(self, key, parent, result):
        real[1](self, key, parent, result)
        real[0](self, key, *self.late[key])

    monkeypatch.setattr(trace.Recorder, "before", late_before)
    monkeypatch.setattr(trace.Recorder, "after", late_after)
    first = audit(model, "batch").first
    assert first is None or first.module != "blocks.0.doubled"


def test_what_rows_depend_on_is_found_by_trying():
    of_tokens = torch.arange(30), frozenset({"position_ids"})
    facts = probe.probe(planted.clean(), *of_tokens)
    scopes = {key[0]: scope for key, scope in facts.scopes.items()}
    past = {"", *(f"blocks.{i}{part}" for i in (0, 1) for part in ("", ".mix"))}
    assert {name for name, scope in scopes.items() if scope == probe.PAST} == past
    assert {scope for name, scope in scopes.items() if name not in past} == {probe.ROW}
    for dtype in (torch.float32, torch.bfloat16):
        both = probe.probe(Both().to(dtype).eval(), torch.arange(30), frozenset())
        assert both.scope == probe.SEQUENCE
    # Rows that a sum's order follows are not rows that it looks at.
    rounding = probe.probe(planted.spoilt("blocks.1.up", "AnyOrder"), *of_tokens)
    assert rounding.scope == probe.PAST and rounding.scopes["blocks.1.up", 0] == probe.ROW
    assert tuple(FORWARD) == checks.OUTPUTS


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_whose_input_is_unknown_is_no_culprit(side):
    """An input of another shape cannot be compared: the module may only pass a difference on."""
    seen = torch.ones(3, dtype=torch.bool)
    entries = []
    for i in range(2):
        digests = torch.tensor([[1, 2], [3, 4], [5, 6 + i]])
        entries.append(Entry(None, {}, {"": Table(digests, seen, 8)}))
    none = torch.zeros(3, dtype=torch.bool)
    assert compare._judge(*entries, none, ROW, [0, 3]).culprit.tolist() == [False, False, True]
    entries[side].unknown = torch.tensor([False, False, True])
    verdict = compare._judge(*entries, none, ROW, [0, 3])
    assert verdict.differs.tolist() == [False, False, True] and not verdict.culprit.any()


class Centred(torch.nn.Module):
    """Looks at the whole sequence, and writes its input."""

    def forward(self, x):
        return x.sub_(x.mean(1, keepdim=True))


def test_modules_that_write_their_input_are_run_again_on_what_it_was():
    parts = torch.nn.Sequential(Centred(), torch.nn.ReLU(inplace=True), Centred())
    with torch.no_grad():
        net = torch.nn.Sequential(torch.nn.Embedding(30, 8), parts).eval()
        facts = probe.probe(net, torch.arange(30), frozenset())
    scopes = {key[0]: scope for key, scope in facts.scopes.items()}
    assert scopes.pop("0") == scopes.pop("1.1") == ROW
    assert scopes == dict.fromkeys(("", "1", "1.0", "1.2"), probe.SEQUENCE)
