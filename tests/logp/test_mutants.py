"""Mistakes that were made elsewhere, planted one by one: each is killed by a test that is named."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from cute_kernels.logp import chunks, config, cpu, exact, op, shards
from cute_kernels.runtime import process_groups, products
from tests import contract
from tests.logp import cases, test_bits, test_op
from tests.logp.cases import BF16, FP32
from tests.logp.shard_cases import at_leaves, case_of, differing, whole_of
from tests.ranks import threads as threaded_ranks

# ---- checks: tests of test_bits, and two that take one case of others ---------------------------

battery = functools.partial(test_bits.test_battery, "forward", FP32, "chain", "cpu")
splits = functools.partial(test_bits.test_splits_of_the_tokens, FP32, "chain", 200, "cpu")
cuts = functools.partial(test_bits.test_a_cut_at_any_multiple_of_16_is_the_same, FP32, "chain")
masked = functools.partial(test_bits.test_padding_with_ignored_tokens_anywhere, BF16, math.nan)
padded = functools.partial(
    test_bits.test_what_padding_of_the_vocabulary_holds_never_shows, 15, BF16, "chain"
)
from_logits = functools.partial(
    test_bits.test_log_probs_of_these_logits_is_linear_logp, BF16, "chain", 0.0
)
at_most_zero = test_bits.test_a_certain_token_has_log_p_of_zero


def values() -> None:
    """Within the bounds of float64 (test_reference.test_drawn_cases_against_float64)."""
    for dtype in (BF16, FP32):
        case = cases.Case(3, 17, 48, 250, 250, dtype, "chain", True, 0.0, "number", True, 0.3)
        x = cases.inputs_of(case)
        found = cases.shares(cases.run(case, x), *cases.exact(case, x))
        assert max(found.values()) <= 1, found


RANKS = [at_leaves(case_of(1024, 1024, FP32), counts) for counts in ([0, 4], [0, 2, 4, 6])]


def ranks() -> None:
    """Two and four ranks (test_shards.test_every_degree_has_the_bytes_of_one)."""
    for cut in RANKS:
        found = threaded_ranks.together(
            len(cut.starts), lambda rank, cut=cut: differing(cut, rank, rank.rank())
        )
        assert not any(found), found


@pytest.fixture(autouse=True)
def threaded():
    """For `ranks`: threads that are ranks; what one rank has is computed before a mutant is."""
    with threaded_ranks.group_of_threads():
        yield
    whole_of.cache_clear()


# ---- mutants ------------------------------------------------------------------------------------


def merge_in_arrival_order(patch) -> None:
    """(max, Σ 2^(y - max)) are added in fp32 as they come, in place of an exact sum."""

    def finish(states, rows):
        top = torch.full((states.shape[1],), float(config.EMPTY * config.BIN))
        total = torch.zeros(states.shape[1])
        for state in states:
            mine = (state[:, config.TOP] * config.BIN).float()
            own = exact._mantissas(state[:, config.SUMS : config.CHOSEN].double())
            own = (own * 2.0**-config.FRACTION).float()
            above = torch.maximum(top, mine)
            total = total * (top - above).exp2() + own * (mine - above).exp2()
            top = above
        lse2 = top + total.log2()
        chosen = states[..., config.CHOSEN].sum(0).to(torch.int32).view(FP32)
        logp = ((chosen * rows.scale - lse2) * config.LN2).clamp(max=0.0)
        logp = torch.where(rows.target == config.MASKED, 0.0, logp)
        return logp, lse2, true_finish(states, rows)[2]

    patch.setattr(exact, "finish", finish)


def bf16_partials(patch) -> None:
    """A unit's sum is handed on in bf16."""
    patch.setattr(cpu, "_unit_sum", lambda v: true_unit_sum(v).bfloat16().float())


def temperature_after_rounding(patch) -> None:
    """Logits are rounded to the dtype of hidden, and divided then."""

    def biased(sums, head):
        return true_biased(sums, head).to(head.weight.dtype).float()

    patch.setattr(cpu, "_biased", biased)


def ignored_as_an_index(patch) -> None:
    """-100 counts from the end, as in x[-100], and nothing is masked."""

    def rows_of(target, temperatures, temperature, ignore_index, vocab):
        return true_rows_of(target % vocab, temperatures, temperature, ignore_index, vocab)

    patch.setattr(op, "rows_of", rows_of)


def mask_by_multiplication(patch) -> None:
    """Gradients of masked rows, and of padding, times 0."""

    def gradients(logits, place, rows, upstream, dtype):
        kept = rows.target >= 0
        every = rows._replace(target=rows.target.clamp(min=0))
        made = true_gradients(logits, place, every, upstream, dtype)
        return made * kept[:, None]

    patch.setattr(cpu, "gradients_of_logits", gradients)


def unit_tree_by_number_of_tokens(patch) -> None:
    """A unit is added another way when there are few tokens, as a decode kernel might."""

    def unit_sum(v):
        if len(v) > 16:
            return true_unit_sum(v)
        total = v[..., 0]
        for i in range(1, 16):
            total = total + v[..., i]
        return total

    patch.setattr(cpu, "_unit_sum", unit_sum)


def exponent_of_the_block(patch) -> None:
    """M is the block's maximum, for all of its units: a part's sums depend on its neighbours."""

    def of_units(exponent, total, weighted):
        top = exponent.amax(1, keepdim=True).expand_as(exponent)
        moved = total * (exponent - top).float().exp2()
        return true_of_units(top, moved, weighted)

    patch.setattr(exact, "of_units", of_units)


def leaf_length_by_rank_count(patch) -> None:
    """A leaf is what a rank has: dhidden is added rank by rank."""

    def leaf_slices(entries, vocab, order):
        return [slice(0, entries)] if entries else []

    patch.setattr(chunks, "leaf_slices", leaf_slices)


def weight_gradient_of_unmasked_hidden(patch) -> None:
    """dW = Gᵀ Hidden with the masked rows as they are: 0 times NaN."""

    def run(self, needs, main_grad):
        if not needs.weight:
            return true_run(self, needs, main_grad)
        made = true_run(self, needs._replace(weight=False), None)
        gradient = self.of_logits(slice(0, self.head.entries))
        return made[0], products.product(gradient.mT, self.hidden.mT), made[2]

    patch.setattr(chunks.Pass, "run", run)


def chunks_of_tokens_by_their_number(patch) -> None:
    """dW is the sum of chunks whose size is a share of the tokens; then it meets main_grad."""

    def run(self, needs, main_grad):
        if main_grad is None:
            return true_run(self, needs, main_grad)
        made = true_run(self, needs._replace(weight=False), None)
        gradient, hidden = self.of_logits(slice(0, self.head.entries)), self.hidden.nan_to_num()
        for some in torch.arange(len(self.hidden)).tensor_split(3):
            if len(some):
                main_grad += products.product(gradient[some].mT, hidden[some].mT)
        return made

    patch.setattr(chunks.Pass, "run", run)


def ranks_descending(patch) -> None:
    """Leaves of the last rank first."""

    def all_gather(t, group):
        every = true_all_gather(t, group)
        return every.flip(0) if t.is_floating_point() else every

    patch.setattr(shards.process_groups, "all_gather", all_gather)


def padding_is_counted(patch) -> None:
    """Rows of weight behind vocab_size take part in the sum."""

    def whole_units(z, place):
        return true_whole_units(z, place._replace(vocab=place.start + z.shape[1]))

    patch.setattr(cpu, "_whole_units", whole_units)


def upstream_of_the_first(patch) -> None:
    """One scalar for all tokens, as of a mean."""

    def upstream_of(d_logp, *others):
        return true_upstream_of(d_logp.flatten()[:1].expand_as(d_logp), *others)

    patch.setattr(op, "upstream_of", upstream_of)


def no_clamp(patch) -> None:
    """log p may be above 0."""

    def finish(states, rows):
        logp, lse2, entropy = true_finish(states, rows)
        return torch.where(logp == 0, 2.0**-24, logp), lse2, entropy

    patch.setattr(exact, "finish", finish)


true_finish, true_of_units = exact.finish, exact.of_units
true_unit_sum, true_biased, true_whole_units = cpu._unit_sum, cpu._biased, cpu._whole_units
true_gradients, true_run = cpu.gradients_of_logits, chunks.Pass.run
true_rows_of, true_upstream_of = op.rows_of, op.upstream_of
true_all_gather = process_groups.all_gather


#: mutant -> the checks that kill it, each of which must.
KILLERS = {
    merge_in_arrival_order: [cuts],
    bf16_partials: [values],
    temperature_after_rounding: [values, from_logits],
    ignored_as_an_index: [masked, values],
    mask_by_multiplication: [masked],
    unit_tree_by_number_of_tokens: [battery],
    exponent_of_the_block: [cuts],
    leaf_length_by_rank_count: [ranks],
    weight_gradient_of_unmasked_hidden: [test_op.test_all_tokens_masked],
    chunks_of_tokens_by_their_number: [splits],
    ranks_descending: [ranks],
    padding_is_counted: [padded],
    upstream_of_the_first: [values],
    no_clamp: [at_most_zero],
}


@pytest.mark.parametrize("check", [values, ranks])
def test_a_check_passes_without_a_mutant(check):
    check()


@pytest.mark.parametrize(
    ("mutant", "check"),
    [(mutant, check) for mutant, checks in KILLERS.items() for check in checks],
    ids=lambda f: getattr(f, "__name__", "check"),
)
def test_a_mutant_is_killed(mutant, check, monkeypatch):
    if check is ranks:  # what one rank has is right
        for cut in RANKS:
            whole_of(cut)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, contract.ContractViolation)):
        check()
