"""Do the pins resolve from the public package index alone, for every Python we name?

    python tools/pins.py                          # uv answers, for all of them: seconds
    python tools/pins.py --pip PYTHON [PYTHON]    # pip answers, for these interpreters: minutes

uv resolves for Pythons that are not installed here, and reads a wheel's metadata without fetching
the wheel; pip does the latter behind a flag.  Neither is told of any other index, of local wheels
or of this machine's settings.  Exit status: 0 all resolve, or skipped with the reason why the index
does not answer; 1 some do not resolve; 2 cannot run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
#: What the README and docs/install.md say to install, each with `-c constraints.txt`.
WAYS = ["torch", ".", ".[cu13]", ".[rocm]", ".[deepspeed]", ".[trl]", ".[dev]"]
#: Of a way that a package in it asks a newer Python for than we do.
OLDEST = {".[trl]": (3, 11)}
#: glibc 2.28, as torch's own wheels.
PLATFORM = "x86_64-manylinux_2_28"
#: Settings that say how to reach the network, not what is on it.
KEPT = {"PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "UV_CACHE_DIR"}

Command = tuple[list[str], str]  # with its standard input


def environment(environ: dict[str, str]) -> dict[str, str]:
    """These variables, but for those that tell pip and uv of other indexes and settings."""
    kept = {k: v for k, v in environ.items() if k in KEPT or not k.startswith(("PIP_", "UV_"))}
    alone = {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
    return kept | alone


def error(command: Command) -> str:
    """What a command printed if it failed; empty if it did not."""
    words, given = command
    run = subprocess.run(
        words,
        cwd=ROOT,
        env=environment(dict(os.environ)),
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return (run.stdout.strip() or f"exit status {run.returncode}") if run.returncode else ""


def with_uv(uv: str, python: str, way: str, constraints: Path) -> Command:
    words = [uv, "pip", "compile", "--no-progress", "--quiet", "-c", str(constraints)]
    words += ["--python-version", python, "--python-platform", PLATFORM]
    if not way.startswith("."):
        return [*words, "-"], way
    extras = [f"--extra={name}" for name in re.findall(r"\w+", way)]
    return [*words, *extras, "pyproject.toml"], ""


def with_pip(uv: str, python: str, way: str, constraints: Path) -> Command:
    """The newest pip under an interpreter: older ones fetch whole wheels before a dry run ends."""
    words = [uv, "run", "--quiet", "--no-project", "--isolated", "--python", python, "--with=pip"]
    words += ["python", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    return [*words, "--use-feature=fast-deps", "-c", str(constraints), way], ""


def silence(uv: str) -> str:
    """Why the index does not answer the smallest question; empty if it does."""
    said = error(
        ([uv, "pip", "compile", "--no-progress", "--quiet", "--no-cache", "-"], "iniconfig")
    )
    return said.splitlines()[-1].strip() if said else ""


def asked(pythons: list[str]) -> list[tuple[str, str]]:
    """(python, way) of all that are to resolve; a Python may be a version or an interpreter."""
    found = []
    for python in pythons:
        said = re.search(r"(\d+)\.(\d+)[^/]*$", python)
        version = tuple(map(int, said.groups())) if said else (4, 0)
        found += [(python, way) for way in WAYS if version >= OLDEST.get(way, (0, 0))]
    return found


def unresolved(command: Callable[[str, str], Command], pythons: list[str]) -> dict:
    """(python, way) -> what the resolver said, for all that it cannot resolve."""
    cases = asked(pythons)
    with ThreadPoolExecutor(4) as pool:
        said = pool.map(lambda case: error(command(*case)), cases)
    return {case: text for case, text in zip(cases, said, strict=True) if text}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pip", nargs="+", metavar="PYTHON", help="ask pip instead, under these")
    parser.add_argument("--uv", default=Path(sys.executable).with_name("uv"), help="ask this uv")
    args = parser.parse_args(argv)
    uv = str(args.uv)
    try:
        reason = silence(uv)
    except OSError as problem:
        print(f"pins: cannot run uv, which `make setup` installs: {problem}")
        return 2
    if reason:
        print(f"pins: skipped: the package index does not answer: {reason}")
        return 0
    start = time.monotonic()
    if args.pip:
        wrong = unresolved(lambda python, way: with_pip(uv, python, way, CONSTRAINTS), args.pip)
    else:
        wrong = unresolved(lambda python, way: with_uv(uv, python, way, CONSTRAINTS), PYTHONS)
    seconds = time.monotonic() - start
    if wrong and (reason := silence(uv)):
        print(f"pins: skipped: the package index stopped answering: {reason}")
        return 0
    for (python, way), text in wrong.items():
        print(f"pins: {way} does not resolve for {python}:\n{text}\n")
    pythons = args.pip or PYTHONS
    count = len(asked(pythons))
    print(
        f"pins: {count - len(wrong)} of {count} resolve from the"
        f" public index alone ({', '.join(WAYS)}; Python {', '.join(pythons)}), {seconds:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
