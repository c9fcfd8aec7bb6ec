"""Recipes of the documentation; one rank of one: ``torchrun -m tests.integrations.recipe FILE``.

It leaves out what DeepSpeed compiles at first use on a CPU, a faster all_reduce (30 s), and the end
of the interpreter: with gloo's threads it is torch's, and no part of a recipe.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

from tests.ranks import ROOT


def run_block(page: str, heading: str, **names: object) -> dict[str, object]:
    """Run the first ``py`` block of a section of a page, given some names; all names after it.

    A block in ``python`` is run with those before it: tests/test_docs.py.
    """
    text = (ROOT / page).read_text().partition(f"# {heading}\n")[2]
    code = re.match(r"(?:(?!^##).)*?^```py\n(.*?)^```$", text, re.M | re.S)[1]
    exec(compile(code, page, "exec"), names)
    return names


def main(file: str) -> None:
    if "import deepspeed" in Path(file).read_text():
        from deepspeed.comm import torch as transport

        transport.build_shm_op = lambda: None
    runpy.run_path(file, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
