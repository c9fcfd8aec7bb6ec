"""Every constant of the Triton kernels of linear attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TritonPlan:
    """Sizes of programs, which decide no bit and that no measurement has tuned, and what does.

    conv_rows, conv_channels: Rows of a program of the convolution's forward; channels of one warp.
    conv_ahead: Rows that it loads together, while it works on as many.
    sum_channels: Channels of a program that sums over the rows of a chunk of the decay.
    add_lanes, add_ahead: Channels, times slots that are folded, of a program that adds sums of
        chunks; groups of slots that it loads together.
    norm_rows: Rows of a program of l2norm.
    gate_elements: Elements of a program of the decay.
    chain_columns, output_columns: Columns of V of a program of the delta rule, at most.  Fewer than
        64 are not safe, see `config.DELTA_GPU_SIZES`.
    chain_stages, gradient_stages: Chunks whose loads are under way in those programs, and in those
        of the backward.
    delta_warps, gradient_warps, part_warps, step_warps: Warps of its programs; of those behind the
        chain in its backward, of dq's and dk's; of decoding.
    sums_warps, channel_warps: Of programs that sum gates by channel, and of those inside of chunks.
    step_columns: Columns of V of a program of decoding.
    step_heads: Heads of a program of the steps of a state space scan.
    ssd_columns, ssd_rows: Columns of a state and rows of a chunk of its other programs, which are
        those of parts of sums: they decide bits of gradients.
    ssd_heads: Heads of a group of a program of its forward, at most.
    ssd_warps, ssd_stages: Warps and steps of a pipeline of those.  Where a group's rows have their
        gradients, more steps would leave an SM one program.
    log_terms: Terms of the series of ln(1 + u); the next is below 2^-29 of it.
    fp_fusion: Whether the compiler may fuse; a multiply-add is written as one.
    """

    conv_rows: int = 32
    conv_channels: int = 128
    conv_ahead: int = 4
    sum_channels: int = 64
    add_lanes: int = 32
    add_ahead: int = 32
    norm_rows: int = 16
    gate_elements: int = 512
    chain_columns: int = 64
    chain_stages: int = 2
    gradient_stages: int = 1
    output_columns: int = 64
    delta_warps: int = 4
    gradient_warps: int = 4
    part_warps: int = 4
    step_columns: int = 64
    step_warps: int = 4
    sums_warps: int = 2
    channel_warps: int = 8
    step_heads: int = 32
    ssd_columns: int = 64
    ssd_rows: int = 64
    ssd_heads: int = 8
    ssd_warps: int = 4
    ssd_stages: int = 2
    log_terms: int = 8
    num_warps: int = 4
    fp_fusion: bool = False


TRITON = TritonPlan()


@dataclass(frozen=True)
class GatedNormPlan:
    """Sizes of programs of gated_rms_norm, tuned on an H200; ``rows`` and ``fold`` decide bits.

    forward_tile: Elements of a program, if one group has not more.
    forward_elements: Of a tile, that one thread of warps of 32 has.
    backward_elements: Likewise, of padded groups up to these sizes.
    """

    forward_tile: int = 1024
    forward_elements: int = 16
    backward_elements: tuple[tuple[int, int], ...] = (
        (128, 8), (256, 4), (512, 8), (1024, 16), (4096, 8), (8192, 16),
    )  # fmt: skip

    def rows(self, padded: int) -> int:
        """Rows of a step of the backward, of groups padded to ``padded``: the lanes of its sums.

        With other numbers of narrow groups Triton 3.6 moves each tile through shared memory.
        """
        return 16 if padded <= 128 else 1

    def fold(self, padded: int) -> int:
        """Pieces of a part, which programs of their own add up."""
        return 4 if padded <= 256 else 1

    def elements(self, padded: int) -> int:
        """Elements of a thread of the backward."""
        return next(elements for size, elements in self.backward_elements if padded <= size)


GATED_NORM = GatedNormPlan()


@dataclass(frozen=True)
class SelectivePlan:
    """Sizes of programs of the selective scan, which no measurement has tuned.

    channels: Of a program, one a lane; its share of dB and dC is one part of their sums.
    ahead: Rows of a program that are computed between two stores.
    states: Numbers of the states of rows that a lane of the backward holds.
    """

    channels: int = 32
    ahead: int = 4
    states: int = 32
    fp_fusion: bool = False

    def rows(self, state: int) -> int:
        """Rows whose states a program of the backward holds."""
        return max(1, self.states // state)


SELECTIVE = SelectivePlan()
