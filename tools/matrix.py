"""Run the op, compile and integration tests on the oldest torch that we declare and the newest.

    python tools/matrix.py [--torch VERSION ...] [--transformers VERSION ...] [--folder FOLDER]
        [--tests PATH ...]

The tests of whole models run on the oldest transformers that we declare.  Each version gets a
virtual environment under the folder, with everything else at the tested pins
but for triton, which follows torch; a second run starts at once.  UV_TORCH_BACKEND=cpu takes
PyTorch's CPU builds; the public index's default build is 6 GB on disk a version, with CUDA's
libraries.  Prints the rows of a table of docs/support.md.  Exit status: 0 all pass; 1 some fail;
2 cannot run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What meets torch's own machinery; the kernels under it do not change with torch.
TESTS = [
    "tests/gemm/test_op.py",
    "tests/sparse_attn/test_op.py",
    "tests/integrations",
    "tests/demo",
    "tests/compile/test_call.py",
    "tests/gemm/test_triton.py",
    "tests/gemm/test_triton_code.py",
    "tests/test_package.py",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/test_torch*.py")),
]
#: What meets transformers.
MODEL_TESTS = ["tests/model/patch", "tests/integrations"]
#: Package of a leg -> the pins that go with it: torch asks for a Triton of its own.
NOT_PINNED = {
    "torch": re.compile(r"^(torch|triton)==.*\n", re.M),
    "transformers": re.compile(r"^transformers==.*\n", re.M),
}
NAMES = ["torch", "triton", "transformers", "nvidia-cutlass-dsl"]
COLUMNS = ["torch", "triton", "transformers", "CuTe DSL", "Python", "tests", "date", "commit"]
VERSIONS = f"""
import importlib.metadata as m, json, platform
print(json.dumps([*(m.version(n) for n in {NAMES}), platform.python_version()]))
"""


def output(words: list[str | Path], given: str = "") -> str:
    """What a command printed; one that fails ends the program with 2, its messages shown."""
    run = subprocess.run(
        [str(word) for word in words], cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True
    )
    if run.returncode:
        print(f"matrix: cannot run: {words[0]} ended with {run.returncode}")
        sys.exit(2)
    return run.stdout


def oldest(package: str) -> str:
    """The least version that pyproject.toml accepts."""
    (bound,) = set(re.findall(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    return bound


def newest(uv: Path) -> str:
    """The newest version on the index for this Python."""
    resolved = output([uv, "pip", "compile", "--quiet", "--no-annotate", "-"], "torch")
    return re.search(r"^torch==(\S+)", resolved, re.M).group(1)


def install(uv: Path, package: str, version: str, folder: Path) -> Path:
    """The interpreter of an environment that has this version and the tree's own code."""
    place = folder / f"{package}-{version}"
    python = place / "bin" / "python"
    if not python.exists():
        output([uv, "venv", "--quiet", "--python", sys.executable, place])
    constraints = folder / f"{place.name}.txt"
    constraints.write_text(NOT_PINNED[package].sub("", (ROOT / "constraints.txt").read_text()))
    exact = f"{package}=={version}" if version.count(".") > 1 else f"{package}=={version}.*"
    words = [uv, "pip", "install", "--quiet", "--python", python, "-c", constraints]
    print(f"matrix: installing {exact} into {place} ...", flush=True)
    output([*words, exact, "--editable", f"{ROOT}[dev]"])
    return python


def run_tests(python: Path, tests: list[str], results: Path) -> tuple[dict[str, int], list[str]]:
    """How many tests ended how, and the names of those that failed."""
    words = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not gpu"]
    words += ["-p", "no:cacheprovider", f"--junit-xml={results}", *tests]
    log = results.with_suffix(".log")
    results.unlink(missing_ok=True)
    with log.open("w") as sink:
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([str(w) for w in words], cwd=ROOT, env=environ, stdout=sink, stderr=sink)
    if not results.exists():
        print(f"matrix: cannot run: pytest wrote no results; see {log}")
        sys.exit(2)
    suite = ElementTree.parse(results).getroot().find("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return counts, failed


def verdict(counts: dict[str, int]) -> str:
    """`12 passed, 1 failed, 2 skipped`."""
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    shown = [f"{passed} passed"] + [f"{failed} failed"] * bool(failed)
    return ", ".join(shown + [f"{counts['skipped']} skipped"] * bool(counts["skipped"]))


def table(rows: list[list[str]]) -> str:
    """A Markdown table, as docs/support.md takes it."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def legs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Package and version of each leg; a package that is named alone runs alone."""
    asked = {"torch": args.torch, "transformers": args.transformers}
    if all(versions is None for versions in asked.values()):
        asked = {package: [] for package in asked}
    ends = {"torch": lambda: [oldest("torch"), newest(args.uv)]}
    ends["transformers"] = lambda: [oldest("transformers")]
    return [
        (package, version)
        for package, versions in asked.items()
        if versions is not None
        for version in versions or ends[package]()
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", nargs="*", metavar="VERSION", help="default: oldest and newest")
    parser.add_argument("--transformers", nargs="*", metavar="VERSION", help="default: oldest")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--tests", nargs="+", metavar="PATH")
    parser.add_argument("--uv", type=Path, default=Path(sys.executable).with_name("uv"))
    args = parser.parse_args(argv)
    if not args.uv.exists():
        print(f"matrix: cannot run: there is no {args.uv}; `make setup` installs it")
        return 2
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    commit = output(["git", "describe", "--always", "--dirty", "--abbrev=7"]).strip()
    today = datetime.date.today().isoformat()
    rows, failures = [], []
    for package, version in legs(args):
        python = install(args.uv, package, version, folder)
        tests = args.tests or (TESTS if package == "torch" else MODEL_TESTS)
        start = time.monotonic()
        counts, failed = run_tests(python, tests, folder / f"{package}-{version}.xml")
        print(f"matrix: {package} {version}: {verdict(counts)}, {time.monotonic() - start:.0f} s")
        versions = json.loads(output([python, "-c", VERSIONS]))
        rows.append([*versions, verdict(counts), today, f"`{commit}`"])
        failures += [f"{package} {version}: {name}" for name in failed]
    print("\n".join(["", table(rows), "", *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
