"""Processes that form a gloo group on this CPU: a test starts and hears them, each joins.

A script of ranks is a module, ``python -m MODULE RANK STORE``, whose last line of output is JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]


class Ended(NamedTuple):
    """Exit code (minus the signal that killed it) and output of one rank."""

    code: int
    out: str
    err: str


def run_ranks(
    module: str, world: int, folder: Path, *arguments: str, **variables: str
) -> list[Ended]:
    """Start ``world`` ranks of a script and wait for all of them.

    Args:
        folder: where their store and their output are written.
        arguments: to the script, after the rank and the store.
        variables: of the environment, besides this process's.

    Raises:
        subprocess.TimeoutExpired: a rank did not end by itself.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | variables
    # Files, not pipes: a full pipe of one rank would block the collectives of all.
    outs, errs = ([folder / f"{rank}.{end}" for rank in range(world)] for end in ("out", "err"))
    started = []
    try:
        for rank, (out, err) in enumerate(zip(outs, errs, strict=True)):
            command = [sys.executable, "-m", module, str(rank), str(folder / "store"), *arguments]
            with out.open("w") as stdout, err.open("w") as stderr:
                started.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr
                    )
                )
        codes = [process.wait(timeout=HANG_SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = ([file.read_text(errors="replace") for file in files] for files in (outs, errs))
    return [Ended(*ended) for ended in zip(codes, *texts, strict=True)]


def reports(module: str, world: int, folder: Path) -> list[dict]:
    """What each of ``world`` processes reports; all must end well."""
    ended = run_ranks(module, world, folder)
    failed = {rank: one.err[-3000:] for rank, one in enumerate(ended) if one.code}
    assert not failed, "\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items())
    return [json.loads(one.out.splitlines()[-1]) for one in ended]


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
