"""Defects of the SM90 forward: each replaces helpers while the kernel is compiled."""

from __future__ import annotations

import dataclasses


def scores_of_the_next_stage(monkeypatch, module):
    true = module.ForwardSm90.qk
    monkeypatch.setattr(
        module.ForwardSm90,
        "qk",
        lambda self, ctx, stage: true(self, ctx, (stage + 1) % self.stages),
    )


def values_of_the_stage_of_the_scores(monkeypatch, module):
    """V of the next block: K is one block ahead."""
    true = module.ForwardSm90.pv
    monkeypatch.setattr(
        module.ForwardSm90,
        "pv",
        lambda self, ctx, stage: true(self, ctx, (stage + 1) % self.stages),
    )


def no_turn_given(monkeypatch, module):
    monkeypatch.setattr(module.ForwardSm90, "warp_scheduler_arrive", lambda self, consumer: None)


def o_told_before_it_is_kept(monkeypatch, module):
    """The warp that stores O may read its place before all of O is there."""
    output = module.output
    true_keep, true_publish, kept = output.Output.keep, output.Handover.publish, []

    def publish(self, *args):
        true_publish(self, *args)
        if kept:
            true_keep(*kept.pop())

    monkeypatch.setattr(output.Output, "keep", lambda *args: kept.append(args))
    monkeypatch.setattr(output.Handover, "publish", publish)


def o_given_back_before_it_is_read(monkeypatch, module):
    """Its stage of V is free for the next tile's while O is on its way out."""
    monkeypatch.setattr(module.cute.arch, "cp_async_bulk_wait_group", lambda n, read=False: None)


def o_told_over_what_is_unread(monkeypatch, module):
    """A consumer does not wait until its O of the tile before has been stored."""
    monkeypatch.setattr(module.output.Handover, "await_empty", lambda self, consumer, phase: None)


def _masking(monkeypatch, module, masked):
    """Both element masks with ``masked(score, kept)`` in place of the selection."""
    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def keep_between(scores, lane, first, last):
        offset = 2 * (lane % 4)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(cute.size(scores) // 4):
                for side in cutlass.range_constexpr(2):
                    column = 8 * i + side + offset
                    kept = (first[half] <= column) & (column <= last[half])
                    scores[4 * i + 2 * half + side] = masked(scores[4 * i + 2 * half + side], kept)

    @cute.jit
    def keep_bits(scores, lane, words):
        offset = 2 * (lane % 4)
        for half in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(cute.size(scores) // 4):
                word = words[i // 4, half] >> offset
                for side in cutlass.range_constexpr(2):
                    kept = (word & (1 << (8 * (i % 4) + side))) != 0
                    scores[4 * i + 2 * half + side] = masked(scores[4 * i + 2 * half + side], kept)

    monkeypatch.setattr(module.mask, "keep_between", keep_between)
    monkeypatch.setattr(module.mask, "keep_bits", keep_bits)


def masked_by_multiplication(monkeypatch, module):
    """Score times 1 or Inf, less Inf where masked: right unless a masked key is NaN."""
    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def masked(score, kept):
        one = cutlass.Float32(1.0) if kept else cutlass.Float32(0.0)
        least = cutlass.Float32(0.0) if kept else -cutlass.Float32.inf
        return score * one + least

    _masking(monkeypatch, module, masked)


def masked_with_a_large_number(monkeypatch, module):
    """-2^100 for -inf: a row without keys is then a mean of what it must not see."""
    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def masked(score, kept):
        return score if kept else cutlass.Float32(-(2.0**100))

    _masking(monkeypatch, module, masked)


def masks_kept_by_name(monkeypatch, module):
    """No mutant: the masks as ``_masking`` writes them, with the right selection."""
    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def masked(score, kept):
        return score if kept else -cutlass.Float32.inf

    _masking(monkeypatch, module, masked)


def tail_not_masked(monkeypatch, module):
    monkeypatch.setattr(module.mask, "keep_between", lambda *a: None)


def one_key_too_many(monkeypatch, module):
    true_keep = module.mask.keep_between
    monkeypatch.setattr(
        module.mask,
        "keep_between",
        lambda scores, lane, first, last: true_keep(
            scores, lane, first, tuple(at + 1 for at in last)
        ),
    )


def bits_of_the_next_row(monkeypatch, module):
    true_words = module.mask.words_of
    monkeypatch.setattr(
        module.mask,
        "words_of",
        lambda words, tile, row, *rest: true_words(words, tile, row ^ 1, *rest),
    )


def partial_blocks_not_masked(monkeypatch, module):
    monkeypatch.setattr(module.mask, "keep_bits", lambda *a: None)


def output_not_rescaled(monkeypatch, module):
    monkeypatch.setattr(module.softmax, "rescale", lambda values, factor: None)


def rescaled_rows_swapped(monkeypatch, module):
    true_rescale, cute = module.softmax.rescale, module.cute

    @cute.jit
    def rescale(values, factor):
        first, second = factor[0], factor[1]
        factor[0], factor[1] = second, first
        true_rescale(values, factor)

    monkeypatch.setattr(module.softmax, "rescale", rescale)


def _stepping(monkeypatch, module, next_max, guard):
    """The softmax step with another running maximum, or another value to subtract."""
    softmax, cute, cutlass = module.softmax, module.cute, module.cutlass

    @cute.jit
    def raise_max(scores, row_max, factor, shift, scale):
        for half in cutlass.range_constexpr(2):
            before = row_max[half]
            top = next_max(before, softmax.block_max(scores, half))
            row_max[half] = top
            base = guard(top)
            factor[half] = cute.math.exp2((before - base) * scale, fastmath=True)
            shift[half] = -(base * scale)

    monkeypatch.setattr(softmax, "raise_max", raise_max)


def finite(cute, cutlass):
    @cute.jit
    def guard(top):
        return top if top != -cutlass.Float32.inf else cutlass.Float32(0.0)

    return guard


def step_kept_by_name(monkeypatch, module):
    """No mutant: the step as ``_stepping`` writes it."""
    cute = module.cute
    _stepping(monkeypatch, module, cute.arch.fmax, finite(cute, module.cutlass))


def blocks_without_keys_change_the_state(monkeypatch, module):
    """The maximum sinks by 1 in a block of smaller scores: exactly equal, in other bits."""
    cute = module.cute

    @cute.jit
    def next_max(before, block):
        return cute.arch.fmax(before - 1.0, block)

    _stepping(monkeypatch, module, next_max, finite(cute, module.cutlass))


def maximum_of_the_block_only(monkeypatch, module):
    cute = module.cute
    _stepping(monkeypatch, module, lambda before, block: block, finite(cute, module.cutlass))


def no_guard_for_empty_rows(monkeypatch, module):
    """exp2(-inf - -inf) is NaN."""
    _stepping(monkeypatch, module, module.cute.arch.fmax, lambda top: top)


def lanes_not_added(monkeypatch, module):
    monkeypatch.setattr(module.softmax, "finish", lambda row_sum: None)


def key_groups_swapped(monkeypatch, module):
    """The k16 groups of P V in another order."""
    cute, cutlass, warpgroup = module.cute, module.cutlass, module.warpgroup

    @cute.jit
    def pv_swapped(self, ctx, stage):
        pv = self.tiles.pv_mma()
        pv.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for group in cutlass.range_constexpr(cute.size(ctx.tOrP, mode=[2])):
            index = group ^ 1
            a, b = ctx.tOrP[None, None, index], ctx.tOrV[None, None, index, stage]
            cute.gemm(pv, ctx.tOrO, a, b, ctx.tOrO)
        warpgroup.commit_group()

    monkeypatch.setattr(module.ForwardSm90, "pv", pv_swapped)


def blocks_descending(monkeypatch, module):
    """Every list from its end."""
    cute, true_list = module.cute, module.block_union.load_list

    @cute.jit
    def backwards(values, count):
        last = values.iterator + (count - 1)
        return cute.make_tensor(last, cute.make_layout(values.shape, stride=(-1,)))

    def load_list(*args):
        out = true_list(*args)
        entries, tiles = (backwards(x, out.count) for x in (out.entries, out.tiles))
        return dataclasses.replace(out, entries=entries, tiles=tiles)

    monkeypatch.setattr(module.block_union, "load_list", load_list)


def heads_shared_in_turn(monkeypatch, module):
    """h mod Hkv for h // (Hq / Hkv)."""
    from cute_kernels.sparse_attn.device import tile_scheduler

    monkeypatch.setattr(tile_scheduler, "kv_head_of", lambda head, heads, kv_heads: head % kv_heads)


def negative_zero_kept(monkeypatch, module):
    cute, cutlass = module.cute, module.cutlass

    @cute.jit
    def divide(acc_o, half: cutlass.Constexpr, empty, inverse):
        for i in cutlass.range_constexpr(cute.size(acc_o) // 4):
            for side in cutlass.range_constexpr(2):
                index = 4 * i + 2 * half + side
                acc_o[index] = cutlass.Float32(0.0) if empty else acc_o[index] * inverse

    monkeypatch.setattr(module.softmax, "divide", divide)
