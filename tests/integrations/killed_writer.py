"""A writer that is killed, at every one of its steps, while a version lies there already.

``python -m tests.integrations.killed_writer FOLDER`` prints one JSON object.  Each time a fork of
this process publishes version 2 and kills itself before the k-th thing that it does to a file; the
last one is not killed.  What a reader then finds is reported, and what a next writer leaves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from cute_kernels.errors import ManifestError
from cute_kernels.integrations import publish

#: What Python tells of a writer's doings (PEP 578), and what it does not.
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "shutil.rmtree"}
UNTOLD = ("fsync", "close")


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((64, 64), float(version)), "b": torch.full((64,), float(version))}


def killed_at(step: int, folder: Path) -> bool:
    """Publishes version 2 in a fork; whether it was killed."""
    child = os.fork()
    if child == 0:
        count = 0

        def tick() -> None:
            nonlocal count
            count += 1
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def told(function):
            def run(*args):
                tick()
                return function(*args)

            return run

        for name in UNTOLD:
            setattr(publish.os, name, told(getattr(os, name)))
        sys.addaudithook(lambda event, args: tick() if event in EVENTS else None)
        publish.publish_weights(folder, tensors(2), version=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def found(folder: Path) -> dict:
    """The version that a reader finds, and whether its tensors are those of that version."""
    try:
        read = publish.read_weights(folder)
    except ManifestError as error:
        return {"version": str(error), "whole": False}
    number = read.manifest.version
    want = tensors(number)
    same = all(bool((read.tensors[name] == t).all()) for name, t in want.items())
    return {"version": number, "whole": same and read.tensors.keys() == want.keys()}


def main(folder: Path) -> None:
    steps = []
    for step in range(1, 200):
        mine = folder / str(step)
        publish.publish_weights(mine, tensors(1), version=1)
        killed = killed_at(step, mine)
        report = {"killed": killed, **found(mine)}
        publish.publish_weights(mine, tensors(3), version=3, keep=1)
        report["after"] = sorted(os.listdir(mine))
        steps.append(report)
        if not killed:
            break
    print(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
