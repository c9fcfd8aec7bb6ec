"""The pins: one version for each Python, and a check that tells what does not resolve."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
pins = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "pins.py")))
PIN = re.compile(r"^([\w.-]+)==([\w.]+)(?:; python_version (<|>=) \"3\.(\d+)\")?$")


def applying(python: str) -> Counter[str]:
    """How many pins of each package apply to a Python."""
    minor, counts = int(python.partition(".")[2]), Counter()
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, sign, bound = PIN.match(line).groups()
            counts[name] += sign is None or (minor < int(bound)) == (sign == "<")
    return counts


def test_every_package_has_one_pin_in_every_python_that_is_declared():
    declared = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert declared == pins.PYTHONS
    several = {p: {n: c for n, c in applying(p).items() if c != 1} for p in pins.PYTHONS}
    assert several == {python: {} for python in pins.PYTHONS}


def test_every_way_and_every_extra_is_asked():
    """An extra by itself, or as a part of dev; a way of Pythons that may have it."""
    pages = [ROOT / "README.md", ROOT / "docs" / "install.md"]
    text = "\n".join(page.read_text() for page in pages)
    ways = re.findall(r"install -c constraints\.txt (?:-e )?\"?(\.?[\w\[\]]*)", text)
    assert {".", ".[cu13]", ".[rocm]", ".[trl]", ".[dev]"} <= set(ways) <= set(pins.WAYS)
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.optional-dependencies]")[2].partition("\n[project.")[0]
    names = set(re.findall(r"^(\w+) = \[", table, re.M))
    inside = set(re.search(r'"cute-kernels\[(.*)\]"', table).group(1).split(","))
    assert {f".[{name}]" for name in names - inside} <= set(pins.WAYS)
    assert "trl" not in inside, "make setup, and so CI, would install it"
    assert set(pins.WAYS) - {way for _, way in pins.asked(["3.10"])} == {".[trl]"}
    for python in ("3.11", "python3.12", "/opt/3.10/bin/python3.11", "python"):
        assert [way for _, way in pins.asked([python])] == pins.WAYS
    assert ("python3.10", ".[trl]") not in pins.asked(["python3.10", "/usr/bin/python3.10"])


def test_the_resolver_hears_of_no_other_index():
    inputs = {
        "PATH": "/bin",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_EXTRA_INDEX_URL": "https://elsewhere.example",
        "PIP_CERT": "/cert.pem",
        "UV_INDEX": "https://elsewhere.example",
        "UV_TORCH_BACKEND": "cpu",
        "PIP_CONFIG_FILE": "/etc/pip.conf",
    }
    alone = {"PIP_CONFIG_FILE": "/dev/null", "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
    assert pins.environment(inputs) == {"PATH": "/bin", "PIP_CERT": "/cert.pem"} | alone


ANSWERS = {
    "all": ("exit 0", 0, "31 of 31 resolve"),
    "no network": ("echo 'cannot look up the index'; exit 2", 0, "skipped: .*cannot look up"),
    "one refusal": (
        'case "$*" in *--extra=rocm*) echo triton and triton; exit 1;; esac',
        1,
        r"\.\[rocm\] does not resolve for 3\.10:\ntriton and triton(.|\n)*27 of 31 resolve",
    ),
    "the network goes away": (
        'case "$*" in *--no-cache*) test -e gone && echo timed out && exit 2; touch gone;; '
        "*) exit 1;; esac",
        0,
        "skipped: .*stopped answering: timed out",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_the_check_says(tmp_path, capsys, monkeypatch, name):
    script, status, said = ANSWERS[name]
    uv = tmp_path / "uv"
    assert pins.main(["--uv", str(uv)]) == 2 and "make setup" in capsys.readouterr().out
    uv.write_text(f"#!/bin/sh\n{script}\n".replace("gone", str(tmp_path / "gone")))
    uv.chmod(0o755)
    assert pins.main(["--uv", str(uv)]) == status
    assert re.search(said, capsys.readouterr().out)


@pytest.fixture(scope="module")
def uv() -> str:
    """A uv whose index answers."""
    out = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if not out:
        pytest.skip("uv is not installed")
    if reason := pins.silence(out):
        pytest.skip(f"the package index does not answer: {reason}")
    return out


MUTANTS = {
    "another triton than torch's": ("3.12", "triton==3.7.1", "triton==3.6.0", "torch"),
    "a pin that 3.10 cannot have": (
        "3.10",
        'transformers==5.23.0; python_version >= "3.11"',
        "transformers==5.23.0",
        ".[demo]",
    ),
    "a pyarrow that TRL does not take": ("3.12", "pyarrow==26.0.1", "pyarrow==20.0.0", ".[trl]"),
}


# Each asks the package index, which no commit changes.


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_killed(tmp_path, uv, name):
    python, old, new, way = MUTANTS[name]
    text = pins.CONSTRAINTS.read_text()
    assert text.count(old) == 1
    mutant = tmp_path / "constraints.txt"
    mutant.write_text(text.replace(old, new))
    package = new.partition("=")[0]
    assert package in pins.error(pins.with_uv(uv, python, way, mutant))


@pytest.mark.nightly
@pytest.mark.parametrize("way", pins.ON_AARCH64)
def test_wheels_of_aarch64_exist_and_those_of_another_platform_do_not(uv, way):
    words, inputs = pins.on_aarch64(uv, way)
    assert pins.AARCH64 in words and pins.PLATFORM not in words
    assert pins.error((words, inputs)) == ""
    windows = ["x86_64-pc-windows-msvc" if word == pins.AARCH64 else word for word in words]
    assert ("triton" in pins.error((windows, inputs))) == (way == ".[cu13]")


@pytest.mark.nightly
@pytest.mark.parametrize("engine", pins.ENGINES)
def test_engine_pins_resolve_only_with_a_low_enough_bound(tmp_path, uv, engine):
    """The bound that this project had until 0.1.0 must fail: both engines pin 0.1.11."""
    assert pins.error(pins.beside_engine(uv, engine)) == ""
    text = (ROOT / "pyproject.toml").read_text()
    old = "apache-tvm-ffi>=0.1.11"
    assert text.count(old) == 1
    project = tmp_path / "pyproject.toml"
    project.write_text(text.replace(old, "apache-tvm-ffi>=0.1.15"))
    assert "apache-tvm-ffi" in pins.error(pins.beside_engine(uv, engine, project))
