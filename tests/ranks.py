"""Processes that form a gloo group on this CPU: a test starts and hears them, each joins.

A script of ranks is a module, ``python -m MODULE RANK STORE``, whose last line of output is JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

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
    command = [sys.executable, "-m", "tests.ranks", module, str(world), str(folder), *arguments]
    launcher = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = launcher.communicate(timeout=HANG_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, err
    ends = ([folder / f"{rank}.{end}" for rank in range(world)] for end in ("out", "err"))
    texts = ([file.read_text(errors="replace") for file in files] for files in ends)
    return [Ended(*ended) for ended in zip(json.loads(out), *texts, strict=True)]


def launch(module: str, world: int, folder: Path, arguments: list[str]) -> list[int]:
    """Fork ``world`` ranks of a script and wait for them: their exit codes.

    What the script imports is imported once, here; no thread is started before the forks.
    """
    importlib.import_module(module)
    del sys.modules[module]
    ranks = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            _run_rank(module, rank, folder, arguments)
        ranks.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


def _run_rank(module: str, rank: int, folder: Path, arguments: list[str]) -> NoReturn:
    """Run the script in this process, as ``python -m`` does, and exit."""
    # Files, not pipes: a full pipe of one rank would block the collectives of all.
    for end, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), end)
    sys.argv = [module, str(rank), str(folder / "store"), *arguments]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reports(module: str, world: int, folder: Path, *arguments: str) -> list[dict]:
    """Reports of ``world`` processes; all must end well."""
    ended = run_ranks(module, world, folder, *arguments)
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


if __name__ == "__main__":
    print(json.dumps(launch(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])))
