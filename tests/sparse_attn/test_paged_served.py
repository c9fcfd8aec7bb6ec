"""``ck.paged_attention`` as a server calls it: any cuts of a prompt have the bytes of one pass."""

from __future__ import annotations

import random

import pytest
import torch

import cute_kernels as ck
from tests.contract import same_bytes
from tests.sparse_attn.paged_cases import drawn
from tests.sparse_attn.paged_server import Server, tokens


def whole(q, k, v):
    """The prompt in one dense call."""
    return ck.block_sparse_attention(q[None], k[None], v[None], causal=True)[0]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_chunked_prefill(chunk, layout):
    count = 40 if chunk == 1 else 150
    q, k, v = tokens(count)
    server = Server(16, layout=layout)
    pages, parts = server.pages(count), []
    for first in range(0, count, chunk):
        part = slice(first, min(first + chunk, count))
        server.write(pages, first, k[part], v[part])
        parts.append(server.attend((q[part], pages, part.stop))[0])
    assert same_bytes(torch.cat(parts), whole(q, k, v))


def test_a_prefix_cache_hit():
    """Two prompts share their first pages; the second one's queries begin behind them."""
    server, shared = Server(32), 128
    (q, k, v), (_, k2, v2) = tokens(200), tokens(200, seed=1)
    k2, v2 = (torch.cat([a[:shared], b[shared:]]) for a, b in ((k, k2), (v, v2)))
    pages = server.pages(200)
    server.write(pages, 0, k, v)
    hit = pages[: shared // 32] + server.pages(200 - shared)
    server.write(hit, shared, k2[shared:], v2[shared:])
    warm, cold = server.attend((q[shared:], hit, 200), (q, pages, 200))
    assert same_bytes(warm, whole(q, k2, v2)[shared:])
    assert same_bytes(cold, whole(q, k, v))


def test_decode_rows_at_a_tile_edge():
    """Decode at positions 96, 97, 98 and 127 to 129 has the rows of the prefill."""
    q, k, v = tokens(200)
    server = Server(16)
    pages = server.pages(200)
    server.write(pages, 0, k, v)
    want = whole(q, k, v)
    for position in (96, 97, 98, 127, 128, 129):
        (row,) = server.attend((q[position : position + 1], pages, position + 1))
        assert same_bytes(row, want[position : position + 1]), position


def test_an_unrelated_prefill_grows():
    """A decode row beside a prefill of 9, then of 10 tokens, ahead of it and behind it."""
    (q, k, v), (q2, k2, v2) = tokens(97), tokens(10, seed=1)
    server = Server(16)
    pages, others = server.pages(97), server.pages(10)
    server.write(pages, 0, k, v)
    server.write(others, 0, k2, v2)
    rows = []
    for count in (9, 10):
        decode, prefill = (q[96:], pages, 97), (q2[:count], others, count)
        rows += [server.attend(decode, prefill)[0], server.attend(prefill, decode)[1]]
    assert all(same_bytes(row, rows[0]) for row in rows)


class Sequence:
    """A prompt on its way through a server, and the rows that it has so far."""

    def __init__(self, server: Server, prompt: list[torch.Tensor], first: Sequence | None, shared):
        """shared: tokens of ``first`` that it begins with, whole pages of them."""
        self.q, self.k, self.v = prompt
        self.done, self.parts, self.shared = shared, [], shared
        hit = first.pages[: shared // server.page] if shared else []
        self.pages = hit + server.pages(len(self.q) - shared)
        for mine, theirs in zip(prompt[1:], (first.k, first.v) if shared else (), strict=False):
            mine[:shared] = theirs[:shared]

    def step(self, server: Server, count: int) -> tuple[torch.Tensor, list[int], int]:
        """Write the next tokens; what `Server.attend` takes of them."""
        part = slice(self.done, self.done + count)
        server.write(self.pages, self.done, self.k[part], self.v[part])
        self.done += count
        return self.q[part], self.pages, self.done


NIGHT = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 60)]
OPTIONS = [{}, {"window_size": (50, 0)}, {"softcap": 20.0}, {"sinks": torch.linspace(-1, 1.5, 4)}]


@pytest.mark.parametrize("seed", [*range(4), *NIGHT])
def test_any_schedule_of_chunks(seed):
    """Prompts in drawn chunks, beside each other or not, on cold prefixes and on warm ones.

    Steps take some of the sequences and a few or many tokens of each: decoding, speculative rows
    and chunks of prefill.  Each row has its bytes of one pass over the prompt alone.
    """
    draw, options = random.Random(seed), OPTIONS[seed % len(OPTIONS)]
    server = Server(draw.choice((16, 32, 64)), layout=draw.choice(("NHD", "HND")))
    sequences = [Sequence(server, tokens(draw.randint(140, 200), seed), None, 0)]
    later = draw.randint(1, 2)
    while later or any(s.done < len(s.q) for s in sequences):
        first = sequences[0]
        if later and (first.done == len(first.q) or draw.random() < 0.3):
            shared = draw.choice((0, draw.randint(0, first.done))) // server.page * server.page
            prompt = tokens(shared + draw.randint(1, 70), 100 * seed + later)
            sequences.append(Sequence(server, prompt, first, shared))
            later -= 1
        left = [s for s in sequences if s.done < len(s.q)]
        chosen = draw.sample(left, draw.randint(min(1, len(left)), len(left)))
        if not chosen:
            continue
        counts = [min(draw.choice((1, 1, 5, 31, 90)), len(s.q) - s.done) for s in chosen]
        steps = [s.step(server, n) for s, n in zip(chosen, counts, strict=True)]
        for s, out in zip(chosen, server.attend(*steps, **options), strict=True):
            s.parts.append(out)
    for s in sequences:
        want = server.attend((s.q, s.pages, len(s.q)), **options)[0]
        assert same_bytes(torch.cat(s.parts), want[s.shared :])
        if not options:
            assert same_bytes(want, whole(s.q, s.k, s.v))


@pytest.mark.parametrize("options", [{}, {"window": (60, 0), "softcap": 9.0}, {"with_sinks": True}])
def test_speculative_rows(options):
    """One to five rows of a sequence are as many calls of one row, the keys behind it in place."""
    lengths = [(k, keys) for k in range(1, 6) for keys in (k, 97, 128, 130, 259)]
    batch = drawn(lengths, (4, 2, 64), 16, seed=5, padding=2, **options)
    together = ck.paged_attention(*batch.operands()[:6], **batch.options())
    apart = batch.by_row()
    alone = ck.paged_attention(*apart.operands()[:6], **apart.options())
    assert all(map(same_bytes, together, alone))
    # One step at a time, too: no other row is in the call.
    for row in (0, 7, len(apart.seqlens_k) - 1):
        one = apart.only(row)
        out, lse = ck.paged_attention(*one.operands()[:6], **one.options())
        assert same_bytes(out[0], together[0][row])
        assert same_bytes(lse[:, 0], together[1][:, row].contiguous())
