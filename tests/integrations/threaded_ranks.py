"""Ranks that are threads of one process: the product's code, but for mesh and collectives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from cute_kernels.integrations import tensor_parallel as tp
from cute_kernels.runtime import process_groups
from tests.hang import HANG_SECONDS


class Board:
    """Where the threads of a group put what the others take."""

    def __init__(self, degree: int):
        self.slots: list[torch.Tensor | None] = [None] * degree
        self.barrier = threading.Barrier(degree, timeout=HANG_SECONDS)


class Rank:
    """One rank of a group, in place of its ProcessGroup."""

    def __init__(self, board: Board, number: int):
        self.board, self.number = board, number

    def size(self) -> int:
        return len(self.board.slots)

    def rank(self) -> int:
        return self.number

    def everybody(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """What each rank put; all of them meet before and after."""
        self.board.slots[self.number] = mine.clone()
        self.board.barrier.wait()
        taken = list(self.board.slots)
        self.board.barrier.wait()
        return taken


def all_gather(out: torch.Tensor, mine: torch.Tensor, *, group: Rank) -> None:
    out.view(-1).copy_(torch.cat([t.view(-1) for t in group.everybody(mine)]))


def all_to_all(out: torch.Tensor, mine: torch.Tensor, *, group: Rank) -> None:
    size, rank = group.size(), group.rank()
    out.view(size, -1).copy_(torch.stack([t.view(size, -1)[rank] for t in group.everybody(mine)]))


@contextlib.contextmanager
def collectives(monkeypatch) -> Iterator[None]:
    """Inside, `tensor_parallel` takes a `Rank` for a mesh."""
    with monkeypatch.context() as patch:
        patch.setattr(process_groups, "_all_gather", all_gather)
        patch.setattr(tp.dist, "all_to_all_single", all_to_all)
        patch.setattr(tp, "_group", lambda mesh: mesh)
        patch.setattr(process_groups, "devices", lambda group: ["cpu"])
        yield


def together(degree: int, work: Callable[[Rank], object]) -> list[object]:
    """What ``work`` returns on each rank; the first exception of one, once all have ended."""
    board = Board(degree)
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
