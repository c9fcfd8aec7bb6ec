"""Defects of the CPU backend and of the ranges that it reads, planted as texts: a check sees each.

The checks pass on the intact sources, in tests of their own.
"""

from __future__ import annotations

import pytest

from cute_kernels.errors import ScheduleError
from cute_kernels.sparse_attn import config, cpu, lowering
from cute_kernels.sparse_attn.kv_ranges import ranges
from cute_kernels.sparse_attn.paged import cpu as paged
from cute_kernels.sparse_attn.varlen import layout
from tests.anchors import planted
from tests.sparse_attn import pack_cases, test_sequences, test_sinks
from tests.sparse_attn.against_float64 import checked
from tests.sparse_attn.battery import battery, sequence, sequence_op
from tests.sparse_attn.cases import inputs
from tests.sparse_attn.test_cpu import CASE, WIDE, untouched
from tests.sparse_attn.test_paged import unseen_pages
from tests.sparse_attn.test_schedule_bits import BY_HEAD, SHARED, the_order_is_written_out


def causal() -> None:
    battery(sequence_op("causal"), sequence())


def documents() -> None:
    battery(sequence_op("causal documents"), sequence())


def values() -> None:
    assert max(checked(CASE).values()) <= 1


def wide() -> None:
    assert max(checked(WIDE).values()) <= 1


def sinks() -> None:
    x, mask = inputs(1, 2, 1, test_sinks.S, test_sinks.S, 64), test_sinks.MASKS["band"]()
    leaf = test_sinks.drawn_sinks(2)
    above = test_sinks.excess(test_sinks.attended("cpu", x, mask, leaf), x, mask, leaf)
    assert all(ratio <= 1 for ratio in above.values())


def order() -> None:
    the_order_is_written_out(SHARED, "cyclic", backwards=True)


def order_by_head() -> None:
    the_order_is_written_out(BY_HEAD, "cyclic")


def drops_oldest() -> None:
    test_sequences.test_a_cache_that_drops_its_oldest_keys(200, 1, 64)


def padding_before() -> None:
    test_sequences.test_padding_on_either_side(20, 64)


def padding_behind() -> None:
    test_sequences.test_padding_on_either_side(128, 64)


def documents_of_a_buffer() -> None:
    test_sequences.test_packs(60, None, 64)


def copies() -> None:
    for rule in ((False, (40, 9)), (True, (None, None))):
        test_sequences.test_copies(rule)


def varlen() -> None:
    """Sequences alone are no varlen batches."""
    lengths, rule = [130, 61, 300], (False, (40, 9))
    assert test_sequences.varlen_differences(pack_cases.drawn(sum(lengths)), lengths, *rule) == []


PART = "        self.early[head, m, rank] = part\n"
LISTED = "zip(entry[b][h][m][:size], tile[b][h][m][:size], strict=True)"
SINK, RULE, PAGES = "(sink, 1.0)", "(kv - q <= mask.hi)", "zip(tables, keys, strict=True)"
PRODUCTS, DELTA = "mm(queries, keys.mT)", "sinks_gradient(saved.sinks, lse2, delta[:, :, : "
STOP = "end = stop if right is None else np.minimum({}, row + right + 1)"
TABLE = "table = of_sequences(seen, padding, q_offset, kv_offset, sizes, cpu)\n"
HEADS = "range(schedule_head * shared, (schedule_head + 1) * shared)"
#: (Module, the check that sees it) -> what: (old text, new text, ..).
TABLES: dict[tuple, dict[str, tuple[str, ...]]] = {
    (cpu, causal): {
        "one maximum for the block": (
            "scores.amax(dim=1, keepdim=True)",
            "scores.amax().expand(ROWS, 1)",
        ),
        "from the diagonal": (
            f"list({LISTED})",
            f"sorted({LISTED}, key=lambda e: ((e[0] >> 1) > m, -(e[0] >> 1)))",
        ),
        "an order that follows a neighbour": (
            PRODUCTS,
            f"mm(queries.flip(1), keys.flip(1).mT) if queries[0, 0] > 0 else {PRODUCTS}",
        ),
    },
    # As kernels with two lists walk them.
    (cpu, documents): {
        "full blocks first": (f"list({LISTED})", f"sorted({LISTED}, key=lambda e: e[0] & 1)")
    },
    # A NaN in V reaches rows that do not see it.
    (cpu, untouched): {
        "untouched rows are added to": (
            "touched = allowed.any(dim=1, keepdim=True)",
            "touched = torch.ones_like(top, dtype=torch.bool)",
        )
    },
    (cpu, values): {
        "the rule is not evaluated": ("if not partial:", "if partial or True:"),
        "keys beyond Sk are taken": (RULE, f"{RULE} | (kv >= mask.kv_len)"),
        "the rule is one key too wide": (RULE, RULE.replace("hi", "hi + 1")),
        "no rescaling": ("acc * shrink +", "acc +", "total * shrink +", "total +"),
        "P and dS in fp8": ("t.to(dtype).float()", "t.to(torch.float8_e4m3fn).float()"),
        "the softcap's slope is left out": ("1 - bent * bent", "1 - bent * 0"),
        "no gradient of lse": ("else delta - _rows(dlse)", "else delta"),
        "no delta": ("(outs == 0).all(-1), 0.0, delta)", "(outs == 0).all(-1), 0.0, 0 * delta)"),
    },
    (config, wide): {
        "a scale of v's head size": ("head_dim**-0.5", "VALUE_DIMS[head_dim] ** -0.5"),
    },
    (cpu, wide): {
        "delta over half of v": ("(dos * outs).sum", "(dos * outs)[..., :64].sum"),
        "scores over v's head size": (PRODUCTS, "mm(queries[:, :128], keys[:, :128].mT)"),
        "half of v from another row": (
            "    blocks[:, :, :size] = t.transpose(1, 2)\n    return blocks.unflatten(2, (-1",
            "    if dim == 128:\n        t = torch.cat((t[..., :64], t.roll(-1, 1)[..., 64:]), 3)\n"
            "    blocks[:, :, :size] = t.transpose(1, 2)\n    return blocks.unflatten(2, (-1",
        ),
    },
    (cpu, sinks): {
        "a sink not in the sum": (SINK, "(sink, 0.0)"),
        "a sink twice": (SINK, "(sink, 2.0)"),
        "a sink in base e": (SINK, "(sink / LOG2E, 1.0)"),
        "a gradient a tenth too small": (DELTA, DELTA.replace("delta", "0.9 * delta")),
        "a gradient of the other sign": (DELTA, f"-{DELTA}"),
    },
    (cpu, order): {
        "parts as they come": (PART, "        self.total[head, m] += part\n        return\n"),
        "ranks from the other end": (
            PART,
            f"{PART}        own = sorted((k for k in self.early if k[:2] == (head, m)))[::-1]\n"
            "        self.total[head, m] = functools.reduce(torch.add, map(self.early.get, own))\n"
            "        return\n",
        ),
        "ranks by column": ("m, rank[e],", "m, n,"),
        "heads backwards": (HEADS, f"reversed({HEADS})"),
    },
    (cpu, order_by_head): {
        "visits ascending": (
            "for e in range(begin, end):",
            "for e in sorted(range(begin, end), key=entry.__getitem__):",
        ),
    },
    (paged, unseen_pages): {
        "pages of another sequence": (
            PAGES,
            PAGES.replace("tables", "[tables[0] + row[len(tables[0]) :] for row in tables]"),
        ),
        "the tail of the last page": (
            PAGES,
            PAGES.replace("keys", "[-(-n // k_cache.shape[1]) * k_cache.shape[1] for n in keys]"),
        ),
        "the edge of the window": ("else first - left", "else first - left - 1"),
        "queries are the first tokens": (
            "= keys - rows, window",
            "= 0, window",
        ),
        "pages sorted": ("cache[pages]", "cache[sorted(pages)]"),
        "the whole of the first page": ("skipped = first //", "skipped = first = first //"),
    },
    (ranges, drops_oldest): {
        "a dropped key's position does not count": ("= position %", "= 0 * position %"),
        "a dropped key's position counts wrong": (
            "= position %",
            "= (position + 64) %",
        ),
    },
    (ranges, padding_before): {
        "padding left in place": (TABLE, f"{TABLE}    table[..., :2] = 0\n"),
    },
    (ranges, padding_behind): {
        "queries of padding": ("end = torch.where(real, end, first)", "pass"),
    },
    (ranges, documents_of_a_buffer): {
        "a pack is one sequence": ("np.where(starts, column, 0)", "np.where(starts, 0, 0)"),
    },
    # As launchers without varlen kernels read them.
    (layout, copies): {
        "gaps of NaN": ("(0, self.gaps, fill)", "(0, self.gaps, fill or torch.nan)"),
        "a window of one less in a copy": ("np.maximum(begin, row - left)", "row - left + 1"),
        "gaps are seen": ("stop = begin + length", "stop = begin - -length // 128 * 128"),
        "another schedule": ("lowering.OF_SEQUENCES", '"lpt"'),
    },
    (ranges, varlen): {
        "a key of the next sequence": (
            STOP.format("stop"),
            STOP.format("np.minimum(stop + 1, offsets[-1])"),
        ),
        "positions in the batch": ("np.stack((start, np.zeros", "np.stack((0 * start, np.zeros"),
        "a window of one less": (
            "start, row - left)",
            "start, row - left + 1)",
        ),
    },
}
MUTANTS = {
    name: (module, check, texts)
    for (module, check), table in TABLES.items()
    for name, texts in table.items()
}


@pytest.fixture
def cold():
    """No mask and no order of the intact sources is cached, nor one of the changed ones."""
    lowering.cache.clear()
    yield
    lowering.cache.clear()


@pytest.mark.parametrize("name", MUTANTS)
def test_killed(cold, name):
    module, check, texts = MUTANTS[name]
    edits = zip(texts[::2], texts[1::2], strict=True)
    with planted(module, *edits), pytest.raises((AssertionError, ScheduleError)):
        check()
