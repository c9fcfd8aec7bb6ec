"""Dynamic tile scheduler: the t-th ticket that any cluster takes from a counter is tile order[t].

Tickets are handed out in launch order, so a cluster that waits for an earlier ticket waits for one
that has started: with a schedule that `check` calls ``any_residency`` every wait ends, whatever the
dispatch order, the SM count or the number of resident CTAs (reliability.md section 3, O2-O4, O7).

One thread of the cluster's first CTA takes tickets ahead of time and writes each into every CTA of
the cluster; receiving warps read it from their own shared memory.  The counter is zeroed by a
kernel of the same launch sequence, so a CUDA graph replays it.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute, pipeline

#: Tickets in flight per cluster: the next one is there when a tile ends.
STAGES = 2


@cute.kernel
def _zero(counter: cute.Tensor):
    counter[0] = cutlass.Int32(0)


@cute.jit
def zero(counter: cute.Tensor, stream: cuda.CUstream):
    """Launch a kernel that zeroes ``counter`` (Int32 [1]), before the kernel that takes tickets."""
    _zero(counter).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)


@dataclass(frozen=True)
class TicketRing:
    """Ring of tickets in the shared memory of one CTA.

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
        """Initialise the barriers; called by one thread of each CTA before a cluster barrier."""
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, self.receivers * self.cluster)

    @cute.jit
    def dispatch(self, counter: cute.Pointer, total: cutlass.Int32):
        """Dispatch tickets up to ``total``, the end mark; by one thread of the first CTA."""
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        ticket = cutlass.Int32(-1)
        while ticket < total:
            ticket = self.hand_out(counter, state)
            state.advance()

    @cute.jit
    def dispatch_one_by_one(self, counter: cute.Pointer, total: cutlass.Int32, done: cute.Pointer):
        """Dispatch from one thread, without a cluster, a ticket only when the last one is done.

        The mbarrier ``done`` completes a phase a ticket; the CTA holds none in reserve.
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
    def hand_out(self, counter: cute.Pointer, state: pipeline.PipelineState) -> cutlass.Int32:
        """Take the next ticket and send it to every CTA's slot."""
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
    def receive(self, state: pipeline.PipelineState) -> cutlass.Int32:
        """Receive the next ticket, by all lanes of a warp; ``total`` or more means the end.

        The caller advances ``state`` (``ticket_state()``) after each call.
        """
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)
        ticket = cute.make_tensor(self.slots + state.index, cute.make_layout(1))[0]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.empty + state.index, 0)
        return ticket

    @cute.jit
    def receive_alone(self, state: pipeline.PipelineState) -> cutlass.Int32:
        """Receive the next ticket, by one thread that stands for a warp."""
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)
        ticket = cute.make_tensor(self.slots + state.index, cute.make_layout(1))[0]
        cute.arch.mbarrier_arrive(self.empty + state.index, 0)
        return ticket


def ticket_state() -> pipeline.PipelineState:
    """Initial state of a receiving warp."""
    return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
