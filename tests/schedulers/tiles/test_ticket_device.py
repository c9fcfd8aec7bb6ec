"""The atomic-ticket tile source in the simulator: every tile once, in launch order, replayable."""

from __future__ import annotations

import functools

import pytest
import torch

import ptxsim
from ptxsim import modes, skips

ticket_kernel = skips.import_module("tests.schedulers.tiles.ticket_kernel")
pytestmark = pytest.mark.sim

TILES = 37


@functools.cache
def compiled(cluster: int, zeroed: bool = True):
    kernel = ticket_kernel.TicketKernel(cluster, zeroed)
    return ticket_kernel.build(kernel, compile=ptxsim.compile)


def run(cluster: int, grid: int, tiles: int = TILES, counter=None, zeroed: bool = True):
    order = torch.randperm(tiles, generator=torch.Generator().manual_seed(tiles)).int()
    counter = torch.full((1,), 12345, dtype=torch.int32) if counter is None else counter
    visits = torch.zeros(tiles, cluster, ticket_kernel.WORKERS, dtype=torch.int32)
    ticket_of = torch.full((tiles,), -1, dtype=torch.int32)
    compiled(cluster, zeroed)(order, counter, visits, ticket_of, grid)
    return order, counter, visits, ticket_of


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_every_tile_once_in_launch_order(cluster):
    def schedule():
        order, counter, visits, ticket_of = run(cluster, grid=8)
        assert (visits == 1).all()
        assert (ticket_of[order.long()] == torch.arange(TILES)).all()
        # One ticket per tile, and one end mark per cluster.
        assert int(counter) == TILES + 8
        return visits

    modes.run_modes(schedule, modes.QUICK_MODES)


@pytest.mark.parametrize(("grid", "tiles"), [(1, TILES), (TILES, TILES), (60, 5), (3, 0), (1, 1)])
def test_more_or_fewer_clusters_than_tiles(grid, tiles):
    _, _, visits, _ = run(2, grid, tiles)
    assert (visits == 1).all()


def test_a_replay_starts_again():
    """The counter is dirty before every launch, as in a graph's second replay."""
    counter = torch.tensor([-7], dtype=torch.int32)
    for _ in range(3):
        _, counter, visits, _ = run(2, 4, counter=counter)
        assert (visits == 1).all()


def test_a_counter_that_nobody_zeroes_is_noticed():
    """Mutant: without the zeroing launch, the second run visits nothing."""
    counter = torch.zeros(1, dtype=torch.int32)
    _, counter, visits, _ = run(2, 4, counter=counter, zeroed=False)
    assert (visits == 1).all()
    _, _, visits, _ = run(2, 4, counter=counter, zeroed=False)
    assert not (visits == 1).all()


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("dropped", ["mbarrier_wait", "sync_warp"])
def test_mutants_of_receive_are_killed(monkeypatch, dropped, cluster):
    """A slot read before it is full; one given back before every lane has read it."""
    arch = ticket_kernel.cute.arch
    kept, ring = getattr(arch, dropped), ticket_kernel.tickets.TicketRing
    true_receive = ring.receive

    def receive(self, state):
        with monkeypatch.context() as patch:
            patch.setattr(arch, dropped, lambda *a: None)
            return true_receive(self, state)

    monkeypatch.setattr(ring, "receive", receive)
    broken = ticket_kernel.build(ticket_kernel.TicketKernel(cluster), compile=ptxsim.compile)
    monkeypatch.undo()
    assert getattr(arch, dropped) is kept

    def schedule():
        order = torch.arange(TILES).int()
        visits = torch.zeros(TILES, cluster, ticket_kernel.WORKERS, dtype=torch.int32)
        counter, ticket_of = torch.zeros(1).int(), torch.zeros(TILES).int()
        broken(order, counter, visits, ticket_of, 4)
        assert (visits == 1).all()
        return visits

    with pytest.raises(modes.ModeFailure):
        modes.run_modes(schedule, modes.QUICK_MODES)
