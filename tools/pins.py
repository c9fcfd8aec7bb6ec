"""Check that the pins resolve from the public package index alone, and beside vLLM and SGLang.

    python tools/pins.py                          # uv answers, for all of them: seconds
    python tools/pins.py --pip PYTHON [PYTHON]    # pip answers, for these interpreters: minutes

The engines pin torch, the DSL and apache-tvm-ffi themselves, so they are resolved with the extra
cu13 and without constraints.txt, by uv.

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
AARCH64 = "aarch64-manylinux_2_28"
#: What docs/install.md says has wheels on aarch64.
ON_AARCH64 = [".", ".[cu13]"]
#: Settings that say how to reach the network, not what is on it.
KEPT = {"PIP_CERT", "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "UV_CACHE_DIR"}

#: Engines that must resolve together with ".[cu13]", and the oldest glibc that has wheels of them.
ENGINES = {
    "vllm==0.33.0": "x86_64-manylinux_2_31",
    "sglang==0.5.23": "x86_64-manylinux_2_39",
}
#: The Python of the engines' images.
ENGINE_PYTHON = "3.12"

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


def on_aarch64(uv: str, way: str) -> Command:
    """Resolve a way on aarch64 with wheels alone: nothing is built there."""
    words, given = with_uv(uv, ENGINE_PYTHON, way, CONSTRAINTS)
    words = [AARCH64 if word == PLATFORM else word for word in words]
    return [*words[:3], "--only-binary", ":all:", *words[3:]], given


def beside_engine(uv: str, engine: str, project: Path = ROOT / "pyproject.toml") -> Command:
    """Resolve the extra cu13 of ``project`` together with an engine."""
    words = [uv, "pip", "compile", "--no-progress", "--quiet", "--extra=cu13"]
    words += ["--python-version", ENGINE_PYTHON, "--python-platform", ENGINES[engine]]
    return [*words, str(project), "-"], engine


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


def unresolved(commands: dict[tuple[str, str], Command]) -> dict[tuple[str, str], str]:
    """(python, way) -> the resolver's message, for all that it cannot resolve."""
    with ThreadPoolExecutor(4) as pool:
        messages = pool.map(error, commands.values())
    return {case: text for case, text in zip(commands, messages, strict=True) if text}


def all_commands(
    command: Callable[[str, str, str, Path], Command], uv: str, pythons: list[str]
) -> dict[tuple[str, str], Command]:
    """(python, way) -> its command, the engines included."""
    commands = {
        (python, way): command(uv, python, way, CONSTRAINTS) for python, way in asked(pythons)
    }
    commands |= {(ENGINE_PYTHON, f"{way} on aarch64"): on_aarch64(uv, way) for way in ON_AARCH64}
    return commands | {
        (ENGINE_PYTHON, f".[cu13] {engine}"): beside_engine(uv, engine) for engine in ENGINES
    }


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
    pythons = args.pip or PYTHONS
    commands = all_commands(with_pip if args.pip else with_uv, uv, pythons)
    wrong = unresolved(commands)
    seconds = time.monotonic() - start
    if wrong and (reason := silence(uv)):
        print(f"pins: skipped: the package index stopped answering: {reason}")
        return 0
    for (python, way), text in wrong.items():
        print(f"pins: {way} does not resolve for {python}:\n{text}\n")
    print(
        f"pins: {len(commands) - len(wrong)} of {len(commands)} resolve from the public index alone"
        f" ({', '.join(WAYS)}; Python {', '.join(pythons)}; beside {', '.join(ENGINES)};"
        f" {', '.join(ON_AARCH64)} on aarch64),"
        f" {seconds:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
