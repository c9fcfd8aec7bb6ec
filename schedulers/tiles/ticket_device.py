"""The atomic-ticket tile source: the t-th ticket taken, by whichever cluster, is tile order[t].

Tickets are handed out in launch order, so a cluster that waits for an earlier ticket waits for one
that has started: with a schedule that `check` calls ``any_residency`` every wait ends, whatever the
dispatch order, the SM count or the number of resident CTAs (reliability.md section 3, O2-O4, O7).

One thread of the cluster's first CTA takes tickets ahead of time and writes each into every CTA of
the cluster; receiving warps read it from their own shared memory.  The counter is zeroed by a
kernel of the same launch sequence, so a CUDA graph replays it.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute, pipeline

#: Tickets in flight per cluster: the next one is there when a tile ends.
STAGES = 2


@cute.kernel
def _zero(counter: cute.Tensor):
    counter[0] = cutlass.Int32(0)


@cute.jit
def zero(counter: cute.Tensor, stream):
    """Launches the zeroing of ``counter`` (Int32 [1]) ahead of the kernel that takes tickets."""
    _zero(counter).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@dataclass(frozen=True)
class TicketRing:
    """Where one CTA keeps its tickets.

    slots:      Int32 [STAGES] in shared memory.
    full:       mbarriers [STAGES]; a slot is full when its ticket is there.
    empty:      mbarriers [STAGES]; those of the cluster's first CTA count every receiving warp.
    cluster:    CTAs per cluster.
    receivers:  receiving warps per CTA.
    """

    slots: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    cluster: int
    receivers: int

    @cute.jit
    def init(self):
        """By one thread of each CTA, before a cluster-wide barrier."""
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, self.receivers * self.cluster)

    @cute.jit
    def dispatch(self, counter: cute.Pointer, total):
        """By one thread of the cluster's first CTA: tickets until ``total``, then the end mark."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        ticket = cutlass.Int32(-1)
        while ticket < total:
            ticket = self.hand_out(counter, state)
            state.advance()

    @cute.jit
    def dispatch_one_by_one(self, counter: cute.Pointer, total, done: cute.Pointer):
        """By one thread, without a cluster: as ``dispatch``, but the next ticket is taken when the
        mbarrier ``done`` says that the last one is worked off.  A CTA then holds none in reserve.
        """
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        phase = cutlass.Int32(0)
        ticket = self.hand_out(counter, state)
        state.advance()
        while ticket < total:
            cute.arch.mbarrier_wait(done, phase)
            phase = phase ^ 1
            ticket = self.hand_out(counter, state)
            state.advance()

    @cute.jit
    def hand_out(self, counter: cute.Pointer, state: pipeline.PipelineState):
        """The next ticket, taken and sent to every CTA's slot."""
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)
        ticket = cute.arch.atomic_add(counter, cutlass.Int32(1), sem="relaxed", scope="gpu")
        slot, full = self.slots + state.index, self.full + state.index
        if cutlass.const_expr(self.cluster == 1):
            # Remote stores work without a cluster too, but compute-sanitizer refuses them.
            cute.make_tensor(slot, cute.make_layout(1))[0] = ticket
            cute.arch.mbarrier_arrive(full)
        else:
            for rank in cutlass.range_constexpr(self.cluster):
                cute.arch.mbarrier_arrive_and_expect_tx(full, 4, rank)
                cute.arch.store_async_dsmem(slot, ticket, full, rank)
        return ticket

    @cute.jit
    def receive(self, state: pipeline.PipelineState):
        """By every lane of a receiving warp: the next ticket; ``total`` or more means the end.

        The caller advances ``state`` (``ticket_state()``) after each call.
        """
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)
        ticket = cute.make_tensor(self.slots + state.index, cute.make_layout(1))[0]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + state.index, 0)
        return ticket

    @cute.jit
    def receive_alone(self, state: pipeline.PipelineState):
        """``receive`` by one thread that stands for a warp."""
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)
        ticket = cute.make_tensor(self.slots + state.index, cute.make_layout(1))[0]
        cute.arch.mbarrier_arrive(self.empty + state.index, 0)
        return ticket


def ticket_state() -> pipeline.PipelineState:
    """Where a receiving warp starts."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
