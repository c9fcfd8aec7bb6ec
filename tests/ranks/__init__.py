"""Ranks of tests: processes of a gloo group on this CPU or of NCCL on cards; threads: `threads`.

A pool of processes calls the functions that a test sends, and answers with what they return.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
#: Answer of a rank whose process has ended.
GONE = "the process has ended"


class Outcome(NamedTuple):
    """What a call on a rank returned, or the traceback of its exception."""

    value: object
    error: str | None


@functools.cache
def _server() -> subprocess.Popen:
    """`tests.ranks.server` of this process: it imports once, and forks every rank."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ranks.server"],
        cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


class Pool:
    """Ranks of one group, from their first call until one of their calls fails, or `close`."""

    def __init__(self, world: int, module: str) -> None:
        """module: imported before the ranks are forked, so that it is imported once."""
        self._world, self._module = world, module
        self._folder: tempfile.TemporaryDirectory | None = None
        self._ranks: dict[int, connection.Connection] = {}
        self._pids: list[int] = []

    def _start(self) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            pytest.skip("needs torch.distributed with gloo")
        self._folder, server = tempfile.TemporaryDirectory(prefix="ranks"), _server()
        with connection.Listener(f"{self._folder.name}/socket", "AF_UNIX", self._world) as door:
            request = {"world": self._world, "module": self._module, "folder": self._folder.name}
            print(json.dumps(request), file=server.stdin, flush=True)
            answer = json.loads(server.stdout.readline())
            assert answer == "forked", answer
            for _ in range(self._world):
                rank = door.accept()
                number, pid = rank.recv()
                self._ranks[number] = rank
                self._pids.append(pid)

    def close(self) -> None:
        """End the processes."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank in self._ranks.values():
            rank.close()
        self._ranks, self._pids = {}, []
        if self._folder is not None:
            self._folder.cleanup()

    def outcomes(self, function: Callable, *arguments: object) -> list[Outcome]:
        """Call the function on all ranks, and wait for every one; none may hang."""
        if not self._ranks:
            self._start()
        call, outcomes = pickle.dumps((function, arguments)), {}
        for rank in self._ranks.values():
            rank.send_bytes(call)
        for number, rank in sorted(self._ranks.items()):
            assert rank.poll(HANG_SECONDS), f"rank {number} hangs"
            try:
                outcomes[number] = Outcome(*pickle.loads(rank.recv_bytes()))
            except EOFError:
                outcomes[number] = Outcome(None, GONE)
        if any(outcome.error for outcome in outcomes.values()):
            self.close()
        return [outcomes[number] for number in sorted(outcomes)]

    def run(self, function: Callable, *arguments: object) -> list:
        """What the function returns on each rank; an error of one is an error here."""
        outcomes = self.outcomes(function, *arguments)
        errors = {rank: one.error[-3000:] for rank, one in enumerate(outcomes) if one.error}
        assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())
        return [outcome.value for outcome in outcomes]

    def assert_error_not_hang(self, killed: int, function: Callable, *arguments: object) -> None:
        """That the function, which kills one rank, ends all others by an error of the transport."""
        outcomes = self.outcomes(function, *arguments)
        assert outcomes.pop(killed).error == GONE
        for one in outcomes:
            assert re.search(r"Error.*(Connection|peer|gloo)", one.error or ""), one


def pool(world: int):
    """A fixture: the `Pool` of a test module."""

    @pytest.fixture(scope="module")
    def ranks(request) -> Iterator[Pool]:
        processes = Pool(world, request.module.__name__)
        yield processes
        processes.close()

    return ranks


def run(world: int, function: Callable, *arguments: object) -> list:
    """What a function returns on each of so many ranks, which end with it."""
    processes = Pool(world, function.__module__)
    try:
        return processes.run(function, *arguments)
    finally:
        processes.close()


@contextlib.contextmanager
def joined(rank: int, store: str, world: int) -> Iterator[None]:
    """Inside, this process is ``rank`` of the group."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=HANG_SECONDS),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- cards ---------------------------------------------------------------------------------------


def on_cards(function: Callable[[str], int], ranks: int) -> None:
    """Run a script's function, of the device, on a card each; it returns how much differs.

    So many ranks, or those of torchrun; ``--cpu``: over gloo, to try the script itself.  Exit code
    1 where anything differs.
    """
    cpu = "--cpu" in sys.argv[1:]
    if "RANK" in os.environ:
        numbers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return _on_card(numbers[0], numbers[1], "env://", cpu, function)
    if not cpu and torch.cuda.device_count() < ranks:
        sys.exit(f"needs {ranks} GPUs, here are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            arguments = ranks, f"file://{folder}/store", cpu, function
            torch.multiprocessing.spawn(_on_card, arguments, nprocs=ranks)
        except torch.multiprocessing.ProcessExitedException as error:
            sys.exit(error.exit_code or 1)


def _on_card(rank: int, world: int, method: str, cpu: bool, function: Callable) -> None:
    if not cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "gloo" if cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=world)
    try:
        differs = function("cpu" if cpu else "cuda")
        gc.collect()  # modules and their hooks are cycles, and hold the group
    finally:
        dist.destroy_process_group()
    if differs:
        sys.exit(1)


def named_on_all(names: list[str]) -> list[str]:
    """The names that any rank has, on every rank."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, names)
    return sorted({name for one in every for name in one})


def show(line: str) -> None:
    """Print a line, on the first rank."""
    if dist.get_rank() == 0:
        print(line, flush=True)
