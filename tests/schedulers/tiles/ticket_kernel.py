"""A kernel that only schedules: each tile records its ticket, its cluster and its visits."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.compile import fake
from cute_kernels.dsl import pipeline
from cute_kernels.schedulers.tiles import ticket_device as tickets

WORKERS = 2


@dataclass(frozen=True)
class TicketKernel:
    """``cluster`` CTAs per cluster; warp 0 dispatches, warps 1 to WORKERS do the tiles.

    order [T] -> visits [T, cluster, WORKERS] (+1 per visit), ticket_of [T], and log [T]: tile t's
    place in the order in which tiles were begun.
    """

    cluster: int
    zeroed: bool = True

    @cute.jit
    def __call__(
        self,
        order: cute.Tensor,
        counter: cute.Tensor,
        visits: cute.Tensor,
        ticket_of: cute.Tensor,
        grid: cutlass.Int32,
        stream,
    ):
        if cutlass.const_expr(self.zeroed):
            tickets.zero(counter, stream)
        self.kernel(order, counter, visits, ticket_of).launch(
            grid=(self.cluster, 1, grid),
            block=(32 * (1 + WORKERS), 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, order: cute.Tensor, counter: cute.Tensor, visits: cute.Tensor, ticket_of: cute.Tensor
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = SmemAllocator()
        slots = smem.allocate_array(cutlass.Int32, tickets.STAGES)
        barriers = smem.allocate_array(cutlass.Int64, 2 * tickets.STAGES)
        ring = tickets.TicketRing(slots, barriers, barriers + tickets.STAGES, self.cluster, WORKERS)
        if tidx == 0:
            ring.init()
        pipeline.announce_barriers((self.cluster, 1))
        pipeline.await_barriers((self.cluster, 1))
        total = order.shape[0]
        if warp == 0:
            if tidx == 0 and rank == 0:
                ring.dispatch(counter.iterator, total)
        else:
            state = tickets.ticket_state()
            ticket = ring.receive(state)
            state.advance()
            while ticket < total:
                tile = order[ticket]
                if cute.arch.lane_idx() == 0:
                    visits[tile, rank, warp - 1] += 1
                    if rank == 0 and warp == 1:
                        ticket_of[tile] = ticket
                ticket = ring.receive(state)
                state.advance()
        # A CTA's shared memory must outlive the stores and arrivals of its cluster.
        pipeline.announce_barriers((self.cluster, 1))
        pipeline.await_barriers((self.cluster, 1))


def build(kernel: TicketKernel, compile=cute.compile):
    """Compiles one variant against fake tensors."""
    tiles = fake.size()
    ints = cutlass.Int32
    return compile(
        kernel,
        make_fake_compact_tensor(ints, (tiles,)),
        make_fake_compact_tensor(ints, (1,)),
        make_fake_compact_tensor(ints, (tiles, kernel.cluster, WORKERS), stride_order=(2, 1, 0)),
        make_fake_compact_tensor(ints, (tiles,)),
        cutlass.Int32(1),
        fake.stream(),
        options=fake.SM90_OPTIONS,
    )
