"""Who may import whom (design section 3), read off the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cute_kernels"
SCHEDULERS = ROOT / "schedulers"
SYSTEMS = ("gemm", "splitk", "linear_logp", "mhc", "sparse_attn")

#: A module may import only from layers of a lower rank; modules of one rank do not meet.
RANKS: dict[str, float] = {
    "errors": 0,
    "settings": 1,
    "c_library": 1,
    "arch": 2,
    "log": 2,
    "contracts": 3,
    "dispatch": 4,
    "torch_ops": 4,
    "caching": 4,
    "cpu_math": 4,
    "data_parallel": 4,
    "dsl": 4,
    "schedulers.host": 4,
    "compile": 5,
    "schedulers.device": 5,
    "system.triton_plan": 5,
    "system.config": 6,
    "system.masks": 6,
    "system.checks": 7,
    "system.watchdog": 7,
    "system.prepare": 8,
    "system.sequences": 9,
    "system.kernel": 8,
    "system.triton_kernel": 8,
    "system.launch": 9,
    "system.triton_launch": 9,
    "system.cpu": 9,
    "system.reference": 9,
    "system.op": 10,
    "system.sequence_op": 10.5,
    "system.api": 11,
    "about": 12,
    "commands": 12,
    "schedule_command": 12,
    "certify_command": 13,
    "integrations": 13,
    "demo": 14,
    "__main__": 15,
    "__init__": 16,
}

#: Imports inside one layer that are part of its design.
SAME_LAYER = {"compile", "schedulers.host", "schedulers.device", "dsl", "demo", "integrations"}


def modules() -> dict[str, Path]:
    """Dotted name inside the package -> file."""
    found = {}
    for base, prefix in ((PACKAGE, ()), (SCHEDULERS, ("schedulers",))):
        for path in base.rglob("*.py"):
            found[".".join((*prefix, *path.relative_to(base).with_suffix("").parts))] = path
    return found


def layer(name: str) -> str:
    """The layer of a dotted module name such as ``gemm.kernel_sm90``."""
    parts = name.split(".")
    if parts[0] in SYSTEMS:
        role = parts[1] if len(parts) > 1 else "__init__"
        if role == "__init__":
            return "system.config"
        return "system.kernel" if role.startswith("kernel_") else f"system.{role}"
    if parts[0] == "schedulers":
        return "schedulers.device" if parts[-1].endswith("_device") else "schedulers.host"
    return parts[0]


def imports_of(name: str, path: Path, known: set[str]) -> set[str]:
    """The package's own modules that one file imports, anywhere in it."""
    package = ["cute_kernels", *name.split(".")[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{stem}.{alias.name}" for alias in node.names] + [stem]
        else:
            continue
        for target in targets:
            inside = target.removeprefix("cute_kernels.")
            if inside != target and (inside in known or f"{inside}.__init__" in known):
                found.add(inside)
    return found


def outside_imports(path: Path) -> set[str]:
    """Top-level names of every absolute import in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def violations(name: str, path: Path, known: set[str]) -> list[str]:
    """The imports of one module that go up or sideways."""
    mine = layer(name)
    wrong = []
    for target in imports_of(name, path, known):
        theirs = layer(target)
        if theirs == mine and (mine in SAME_LAYER or target.split(".")[0] == name.split(".")[0]):
            continue
        if theirs == "__init__" or RANKS[theirs] >= RANKS[mine]:
            wrong.append(f"{name} ({mine}) imports {target} ({theirs})")
        both = {name.split(".")[0], target.split(".")[0]} & set(SYSTEMS)
        if len(both) == 2 and "gemm" not in both:
            wrong.append(f"{name} imports {target}: systems do not import each other")
    return wrong


def test_every_module_has_a_layer():
    missing = [name for name in modules() if layer(name) not in RANKS]
    assert not missing, f"give these a rank in RANKS: {missing}"


def test_imports_go_down():
    found = modules()
    wrong = [line for name, path in found.items() for line in violations(name, path, set(found))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("cutlass", {"dsl", "compile", "system.kernel", "schedulers.device"}),
        ("triton", {"system.triton_kernel"}),
    ],
)
def test_who_imports_the_compilers(package: str, allowed: set[str]):
    wrong = [
        name
        for name, path in modules().items()
        if package in outside_imports(path) and layer(name) not in allowed
    ]
    assert not wrong


def test_schedulers_host_half_stands_alone():
    for name, path in modules().items():
        if layer(name) == "schedulers.host":
            own = {t for t in imports_of(name, path, set(modules())) if not t.startswith("sched")}
            assert own <= {"errors"}, f"{name} imports {own}"


def test_an_upward_import_is_found(tmp_path: Path):
    """The checker itself: a planted violation of each kind must be reported."""
    known = set(modules())
    planted = tmp_path / "planted.py"
    for name, line in (
        ("gemm.config", "from . import launch"),
        ("gemm.kernel_sm90", "from .launch import gemm"),
        ("errors", "from . import settings"),
        ("arch", "import cute_kernels.gemm.api"),
        ("compile.cache", "from ..gemm import config"),
    ):
        planted.write_text(line)
        assert violations(name, planted, known), f"{name}: {line}"
