"""Ranks that are threads of this process: the product's code, but for mesh and collectives."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from cute_kernels.runtime import process_groups
from tests.hang import HANG_SECONDS


class Board:
    """Slots of a group, in which each thread puts what the others take."""

    def __init__(self, degree: int):
        self.slots: list[torch.Tensor | None] = [None] * degree
        self.barrier = threading.Barrier(degree, timeout=HANG_SECONDS)
        ranks = range(degree)
        #: Messages under way, by sender and receiver, each with its sender's step.
        self.mail = {(a, b): queue.SimpleQueue() for a in ranks for b in ranks}
        #: Calls of `start_messages` by each rank.
        self.steps = [0] * degree
        #: Bytes that each rank has received, in collectives and in messages.
        self.received = [0] * degree

    def take(self, source: int, to: int) -> tuple[int, torch.Tensor]:
        """The next message, once it is there; an error if a rank has ended with one."""
        while not self.barrier.broken:
            with contextlib.suppress(queue.Empty):
                return self.mail[source, to].get_nowait()
            time.sleep(0.001)
        raise threading.BrokenBarrierError


class Rank:
    """One rank of a group, in place of its ProcessGroup."""

    def __init__(self, board: Board, number: int):
        self.board, self.number = board, number

    def size(self) -> int:
        return len(self.board.slots)

    def rank(self) -> int:
        return self.number

    def everybody_with(self, mine: torch.Tensor, sent: list) -> list[tuple[torch.Tensor, list]]:
        """Return what each rank put, and the sizes of its parts."""
        sizes = self.everybody(torch.tensor(sent))
        return [(t, s.tolist()) for t, s in zip(self.everybody(mine), sizes, strict=True)]

    def everybody(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return what each rank put; all of them meet before and after."""
        self.board.slots[self.number] = mine.clone()
        self.board.barrier.wait()
        taken = list(self.board.slots)
        self.board.barrier.wait()
        self.board.received[self.number] += mine.nbytes * (self.size() - 1)
        return taken


def all_gather(out: torch.Tensor, mine: torch.Tensor, *, group: Rank) -> None:
    out.view(-1).copy_(torch.cat([t.view(-1) for t in group.everybody(mine)]))


def start_gather(out: torch.Tensor, mine: torch.Tensor, group: Rank) -> Callable[[], None]:
    assert out.is_contiguous() and out.numel() == mine.numel() * group.size()
    all_gather(out, mine, group=group)
    return lambda: None


def start_all_to_all(
    out: torch.Tensor, mine: torch.Tensor, received: list, sent: list, group: Rank
) -> Callable[[], None]:
    """Other ranks' parts arrive in `finish`: whoever reads them before has NaN."""
    assert sum(received) == out.numel() and sum(sent) == mine.numel()
    before = group.board.received[group.number]
    every = [t.split(s) for t, s in group.everybody_with(mine, sent)]
    parts = [parts[group.number] for parts in every]
    assert [part.numel() for part in parts] == received
    others = sum(part.nbytes for r, part in enumerate(parts) if r != group.number)
    group.board.received[group.number] = before + others
    out.fill_(float("nan"))
    return lambda: out.copy_(torch.cat(parts))


def start_messages(sends: list, receives: list, group: Rank) -> Callable[[], None]:
    board, rank = group.board, group.rank()
    step = board.steps[rank] = board.steps[rank] + 1
    for t, to in sends:
        assert t.is_contiguous()
        board.mail[rank, to].put((step, t.clone()))

    def finish() -> None:
        for out, source in receives:
            sent_in, message = board.take(source, rank)
            # A message is received in the step in which it is sent: a batch of NCCL waits for both.
            assert sent_in == step
            assert out.is_contiguous() and (out.shape, out.dtype) == (message.shape, message.dtype)
            out.copy_(message)
            board.received[rank] += message.nbytes

    return finish


@contextlib.contextmanager
def group_of_threads() -> Iterator[None]:
    """Inside, an op with ``group=`` takes a `Rank`; each computes with one thread.

    Teams of eight ranks would fight.
    """
    team = torch.get_num_threads()
    transports = {
        "_all_gather": all_gather,
        "start_messages": start_messages,
        "start_gather": start_gather,
        "start_all_to_all": start_all_to_all,
        "group_of": lambda value, name: value,
        "devices": lambda group: ["cpu"],
    }
    with mock.patch.multiple(process_groups, **transports):
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(team)


@pytest.fixture
def threaded() -> Iterator[None]:
    """Ranks that are threads, each of which computes alone."""
    with group_of_threads():
        yield


def together(
    degree: int, work: Callable[[Rank], object], board: Board | None = None
) -> list[object]:
    """Return ``work`` of each rank; the first exception of one, once all have ended."""
    board = board or Board(degree)
    results: list[object] = [None] * degree
    errors: list[Exception] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = work(Rank(board, rank))
        except Exception as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degree)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
