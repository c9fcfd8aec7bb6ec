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

import torch.distributed as dist

from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]


def reports(module: str, world: int, folder: Path) -> list[dict]:
    """What each of ``world`` processes reports; all must end well."""
    store = folder / "store"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", module]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(store)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=HANG_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world
    return [json.loads(text.splitlines()[-1]) for text in said]


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
