"""Build the distributions, install the wheel alone, and run the README's examples with it.

    python tools/check_wheel.py [--folder FOLDER]

The wheel is built from the unpacked source distribution.  It goes without extras into a new virtual
environment under the folder, by that environment's pip with this machine's settings; the README's
examples, which need torch alone, run there outside the repository.  Exit status: 0 they printed
what the README shows; 1 they did not; 2 a step before that failed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```output\n(.*?)^```$", re.M | re.S)


def step(*words: str | Path) -> None:
    """Run a command in the repository; one that fails ends the program."""
    print("+", *words, flush=True)
    if subprocess.run([str(word) for word in words], cwd=ROOT).returncode:
        sys.exit(2)


def agree(python: Path, examples: list[tuple[str, str]], what: str) -> bool:
    """Whether the examples, run as one program, print what is shown behind them."""
    code, shown = map("".join, zip(*examples, strict=True))
    with tempfile.TemporaryDirectory() as elsewhere:
        run = subprocess.run(
            [python, "-I", "-c", code], cwd=elsewhere, stdout=subprocess.PIPE, text=True
        )
    print(f"{what}: {len(examples)} examples printed {run.stdout!r}, the README shows {shown!r}")
    return run.returncode == 0 and run.stdout == shown


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "wheel")
    parser.add_argument("--uv", type=Path, default=Path(sys.executable).with_name("uv"))
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    step(args.uv, "build", "--quiet", "--out-dir", folder)
    (wheel,) = folder.glob("*.whl")
    step(sys.executable, "-m", "venv", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    examples = EXAMPLE.findall((ROOT / "README.md").read_text())
    step(*install, wheel)
    return 0 if agree(python, examples, wheel.name) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
