"""Writes cute_kernels/demo/kernels.json anew, on an SM90 GPU: the kernels that the demo asks for.

python -m tests.demo.gpu_kernels OUT.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cute_kernels.compile import cache
from cute_kernels.demo import run
from cute_kernels.gemm.config import ORDERS


def used(order: str) -> list:
    """The identities of the kernels of a short demo, as it asks for them, in a fresh process."""
    command = [sys.executable, "-m", __spec__.name, "--order", order]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def _print_used(order: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run.main(Path(folder), "cuda", None, 0, steps=2, order=order) == 0
    print(json.dumps([json.loads(identity) for identity in cache.loaded()]))


def main(out: Path) -> None:
    lists = []
    for order in ORDERS:
        rows = ",\n".join(f"  {json.dumps(identity)}" for identity in used(order))
        lists.append(f" {json.dumps(order)}: [\n{rows}\n ]")
    out.write_text("{\n" + ",\n".join(lists) + "\n}\n")


if __name__ == "__main__":
    _print_used(sys.argv[2]) if sys.argv[1] == "--order" else main(Path(sys.argv[1]))
