"""Forks ranks for the tests of one process: ``python -m tests.ranks.server``, by `tests.ranks`.

A line of input is a request: a module, which is imported once, here, and so many ranks.  No thread
is started before the forks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import traceback
from multiprocessing import connection
from typing import NoReturn

import torch

from tests.ranks import joined

_PR_SET_PDEATHSIG = 1


def serve(rank: int, world: int, folder: str) -> NoReturn:
    """Be a rank: join the group, and call what the test sends, until it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    test = connection.Client(f"{folder}/socket", "AF_UNIX")
    test.send((rank, os.getpid()))
    torch.set_num_threads(1)
    with joined(rank, f"{folder}/store", world):
        while True:
            try:
                call = test.recv_bytes()
            except (EOFError, ConnectionError):
                os._exit(0)
            try:
                function, arguments = pickle.loads(call)
                answer = pickle.dumps((function(*arguments), None))
            except BaseException:
                test.send_bytes(pickle.dumps((None, traceback.format_exc())))
                os._exit(1)  # an error of those that wait for this rank
            gc.collect()  # modules and their hooks are cycles, and hold groups
            test.send_bytes(answer)


def main() -> None:
    """Fork until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports and ranks print
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in sys.stdin:
        request = json.loads(line)
        try:
            importlib.import_module(request["module"])
            answer = "forked"
        except BaseException:
            answer = traceback.format_exc()
        gc.freeze()
        for rank in range(request["world"] if answer == "forked" else 0):
            if not os.fork():
                serve(rank, request["world"], request["folder"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
