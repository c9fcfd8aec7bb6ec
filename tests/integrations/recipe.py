"""Runs a recipe of the documentation, as one rank: ``torchrun -m tests.integrations.recipe FILE``.

It leaves out what DeepSpeed compiles at first use on a CPU, a faster all_reduce (30 s), and the end
of the interpreter: with gloo's threads it is torch's, and no part of a recipe.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def main(file: str) -> None:
    if "import deepspeed" in Path(file).read_text():
        from deepspeed.comm import torch as transport

        transport.build_shm_op = lambda: None
    runpy.run_path(file, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
