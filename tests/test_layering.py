"""Who may import whom (design section 3), read off the syntax trees."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cute_kernels.systems import SYSTEMS
from tests.import_graph import import_graph, imports_of, modules

FOLDERS = {system.package for system in SYSTEMS}
NAMESPACES = {system.package for system in SYSTEMS if system.namespace}

#: A kernel whose class is derived from that of another one.
DERIVED = re.compile("_(apart|wide)_")

#: A module may import only from layers of a lower rank; modules of one rank do not meet.
RANKS: dict[str, float] = {
    "errors": 0,
    "interpreter": 0,
    "settings": 1,
    "c_library": 1,
    "untraced": 1,
    "arch": 2,
    "data_parallel": 2,
    "log": 2,
    "reduction": 2,
    "compile": 2.5,
    "contracts": 3,
    "runtime": 3,
    "dispatch": 4,
    "torch_ops": 4,
    "caching": 4,
    "checking": 3,
    "cpu_math": 4,
    "near": 4,
    "triton_sums": 4,
    "main_grad": 5,
    "products": 5,
    "groups": 5,
    "operands": 4,
    "dsl": 4,
    "schedulers.host": 4,
    "schedulers.device": 5,
    "certify": 6,
    "system.plan": 5,
    "system.config": 6,
    "system.tiles": 7,
    "system.masks": 6,
    "system.stacked": 6.5,
    "system.tensors": 5,
    "system.checks": 7,
    "system.functions": 7,
    "system.exact": 7,
    "system.chunks": 8,
    "system.shards": 10.5,
    "system.watchdog": 7,
    "system.device": 7,
    "system.prepare": 8,
    "system.kernel": 8,
    "system.derived_kernel": 8.2,
    "system.triton_sums": 7,
    "system.triton_kernel": 8,
    "system.triton_kernel_tokens": 8,
    "system.device_spans": 7,
    "system.sequences": 9,
    "system.launch": 9,
    "system.triton_launch": 9,
    "system.cpu": 9,
    "system.reference": 9,
    "system.passes": 9,
    "system.nodes": 9.5,
    "system.op": 10,
    "system.site_op": 10.5,
    "system.packs": 8.5,
    "system.sequence_op": 10.5,
    "system.pack_op": 10.7,
    "system.api": 11,
    "system.module": 11.2,
    "system.converters": 11.2,
    "system.te": 11.2,
    "system.namespace": 11.5,
    "nn": 11.7,
    "systems": 12,
    "about": 13,
    "commands": 13,
    "schedule_command": 14,
    "info_command": 14,
    "certify_command": 14,
    "integrations": 14,
    "model": 14.5,
    "audit_command": 14.7,
    "demo": 15,
    "__main__": 16,
    "__init__": 17,
}

#: Imports inside one layer that are part of its design.
SAME_LAYER = {
    "compile",
    "certify",
    "schedulers.host",
    "schedulers.device",
    "dsl",
    "system.device",
    "demo",
    "integrations",
    "model",
}


def layer(name: str) -> str:
    """The layer of a dotted module name such as ``gemm.kernel_sm90``."""
    first, *rest = name.split(".")
    if first in FOLDERS:
        role = "_".join(rest[:2]) if rest[0] == "triton" else rest[0]
        if role == "__init__" and first in NAMESPACES:
            return "system.namespace"
        if role == "__init__" or role == "triton___init__":
            return "system.plan"
        if role == "triton_plan":
            return "system.plan"
        if role.startswith("kernel_"):
            return "system.derived_kernel" if DERIVED.search(role) else "system.kernel"
        return f"system.{role}"
    if first == "schedulers":
        return "schedulers.device" if name.endswith("_device") else "schedulers.host"
    return first


def outside_imports(path: Path) -> set[str]:
    """Top-level names of every absolute import in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def empty(path: Path) -> bool:
    """Whether a file imports and defines nothing: the ``__init__`` of a folder."""
    body = ast.parse(path.read_text()).body
    return all(isinstance(node, ast.Expr) for node in body)


def violations(name: str, path: Path, files: dict[str, Path]) -> list[str]:
    """The imports of one module that go up or sideways, or from a system into another."""
    mine, own = layer(name), name.split(".")[0]
    wrong = []
    for target in imports_of(name, path, set(files)):
        theirs, other = layer(target), target.split(".")[0]
        if target.endswith("__init__") and empty(files[target]):
            continue
        if own == other and layer(target) == "system.namespace":
            continue  # ``from . import op``: its names are loaded at their first use
        if {own, other} <= FOLDERS and own != other:
            wrong.append(f"{name} imports {target}: what two systems share moves down")
        elif theirs == mine and mine in SAME_LAYER:
            continue
        elif theirs == "__init__" or RANKS[theirs] >= RANKS[mine]:
            wrong.append(f"{name} ({mine}) imports {target} ({theirs})")
    return wrong


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_every_module_has_a_layer():
    missing = [name for name in modules() if layer(name) not in RANKS]
    assert not missing, f"give these a rank in RANKS: {missing}"


def test_imports_go_down():
    found = modules()
    wrong = [line for name, path in found.items() for line in violations(name, path, found)]
    assert not wrong, "\n".join(wrong)


def test_the_import_graph_has_no_circles():
    graph = import_graph()
    del graph["__init__"]  # which loads public names at their first use
    graph = {name: targets & set(graph) for name, targets in graph.items()}
    assert len(graph) > 100 and circles(graph) == []
    graph["errors"] = graph["errors"] | {"gemm.api"}
    (planted,) = circles(graph)
    assert {"errors", "gemm.api", "gemm.op"} <= set(planted)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        (
            "cutlass",
            {
                *("dsl", "compile", "certify", "schedulers.device"),
                *("system.kernel", "system.derived_kernel", "system.device"),
            },
        ),
        (
            "triton",
            {
                "triton_sums",
                "system.triton_kernel",
                "system.triton_kernel_tokens",
                "system.triton_sums",
            },
        ),
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
            own = {t for t in imports_of(name, path, set(modules())) if layer(t) != layer(name)}
            assert own <= {"errors"}, f"{name} imports {own}"


def test_certificates_are_not_for_run_time():
    """Nothing but their command reads them."""
    users = {
        name
        for name, targets in import_graph().items()
        if any(target.startswith("certify.") for target in targets)
    }
    assert {name for name in users if not name.startswith("certify.")} == {"certify_command"}


#: Imports that go up, sideways, or from one system into another, in either direction.
PLANTED = [
    ("gemm.config", "from . import launch"),
    ("gemm.kernel_sm90", "from .launch import gemm"),
    ("errors", "from . import settings"),
    ("arch", "import cute_kernels.gemm.api"),
    ("compile.cache", "from ..gemm import config"),
    ("compile.cache", "from ..certify import sass"),
    ("gemm.reference", "from ..sparse_attn import masks"),
    ("sparse_attn.reference", "from ..gemm import reference"),
    ("gemm.kernel_sm90", "from ..sparse_attn.device import walk"),
    ("sparse_attn.kernel_fwd_sm90", "from ..gemm.kernel_sm90 import GemmSm90"),
    ("gemm.triton.launch", "from ...sparse_attn.triton import plan"),
    ("sparse_attn.api", "from cute_kernels.gemm import config"),
    ("dsl.mma", "from ..sparse_attn.device import slope"),
    ("gemm.api", "from ..model.audit import api"),
    ("integrations.transformers", "from ..model.audit import probe"),
    ("model.audit.rows", "from ...demo import model"),
    ("schedulers.tiles.raster", "from cute_kernels import caching"),
]


@pytest.mark.parametrize(("name", "line"), PLANTED)
def test_a_planted_import_is_found(tmp_path: Path, name: str, line: str):
    planted = tmp_path / "planted.py"
    planted.write_text(line)
    assert violations(name, planted, modules()), f"{name}: {line}"
