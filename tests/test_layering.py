"""Who may import whom (design section 3), read off the syntax trees."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from cute_kernels.systems import PUBLIC, SYSTEMS
from tests.import_graph import ROOT, import_graph, imports_of, modules
from tests.trees import parsed, sources

FOLDERS = {system.package for system in SYSTEMS}
NAMESPACES = {system.package for system in SYSTEMS if system.namespace}

#: A module imports from lower floors, and from its own where `MEETS` says so.
FLOORS: dict[str, int] = {
    "errors": 0,
    "lazy": 0,
    "settings": 1,
    "systems": 1,
    "cpu": 1,
    "schedulers.host": 1,
    "arch": 2,
    "log": 2,
    "compile": 3,
    "contracts": 3,
    "runtime": 4,
    "dsl": 5,
    "schedulers.device": 6,
    "system.config": 6,
    "system.checks": 7,
    "system.kernel": 8,
    "system.launch": 9,
    "system.op": 10,
    "system.api": 11,
    "about": 12,
    "nn": 12,
    "verify": 12,
    "integrations": 12,
    "model": 13,
    "cli": 14,
    "verify.command": 15,
    "verify.__main__": 16,
    "schedulers.__main__": 15,
    "demo": 15,
    "__main__": 16,
    "__init__": 17,
}

#: Layers whose modules import each other.  No circle of imports is allowed there either.
MEETS = set(FLOORS) - {"errors", "lazy", "settings", "systems", "arch", "log", "contracts", "about"}

#: Modules of a system's folder, by layer.  Folders in it count with their modules.
ROLES = {
    "system.config": "__init__ config tensors masks tiles triton triton.plan kv_ranges varlen "
    "paged rings",
    "system.checks": "checks functions exact pack_gqa policy_checks policy_losses paged.checks",
    "system.launch": "launch entries catalogue cpu triton.launch chunks lowering passes "
    "kv_ranges.ranges kv_ranges.launch varlen.layout "
    "paged.launch paged.cpu triton.paged triton.routing cpu_chunks cpu_delta "
    "cpu_gate cpu_ssd triton.gate cpu_gated_norm triton.gated_norm triton.delta "
    "triton.delta_step triton.delta_backward triton.ssd "
    "triton.ssd_backward triton.selective",
    "system.op": "op nodes site_op recompute routing_op shards exchange policy_op "
    "policy_sweep paged.op op_conv op_delta op_gate op_scan op_ssd op_selective op_gated_norm",
    "system.api": "api module converters te paged.api cache",
}
LAYER_OF = {role: name for name, roles in ROLES.items() for role in roles.split()}


def layer(name: str) -> str:
    """The layer of a dotted module name such as ``gemm.kernel_sm90``."""
    first, *rest = name.split(".")
    if first in FOLDERS:
        role = ".".join(rest).removesuffix(".__init__")
        if role == "__init__" and first in NAMESPACES:
            return "system.api"
        if rest[0] == "device" or rest[-1].startswith(("kernel", "sums")):
            return "system.kernel"
        return LAYER_OF.get(role, f"system.{role}")
    if first == "schedulers" and rest != ["__main__"]:
        return "schedulers.device" if name.endswith("_device") else "schedulers.host"
    return name if name in FLOORS else first


def outside_imports(path: Path) -> set[str]:
    """Top-level names of every absolute import in a file."""
    out = set()
    for node in parsed(path).nodes:
        if isinstance(node, ast.Import):
            out |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            out.add(node.module.split(".")[0])
    return out


def empty(path: Path) -> bool:
    """Whether a file imports and defines nothing: the ``__init__`` of a folder."""
    return all(isinstance(node, ast.Expr) for node in parsed(path).tree.body)


def violations(name: str, path: Path, files: dict[str, Path]) -> list[str]:
    """The imports of one module that go up or sideways, or from a system into another."""
    mine, own = layer(name), name.split(".")[0]
    wrong = []
    for target in imports_of(name, path, set(files)):
        theirs, other = layer(target), target.split(".")[0]
        if target.endswith("__init__") and empty(files[target]):
            continue
        if own == other and own in NAMESPACES and target == f"{own}.__init__":
            continue  # ``from . import op``: its names are loaded at their first use
        if {own, other} <= FOLDERS and own != other:
            wrong.append(f"{name} imports {target}: what two systems share moves down")
        elif theirs == mine and mine in MEETS:
            continue
        elif theirs == "__init__" or FLOORS[theirs] >= FLOORS[mine]:
            wrong.append(f"{name} ({mine}) imports {target} ({theirs})")
    return wrong


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    out = []

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
                out.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return out


def test_every_module_has_a_layer():
    missing = [name for name in modules() if layer(name) not in FLOORS]
    assert not missing, f"give these a row in FLOORS or ROLES: {missing}"


def test_no_folder_has_the_name_of_a_public_function():
    """``ck.<name>`` would be the folder as soon as anything imports a module of it."""
    wrong = [s.package for s in SYSTEMS if s.package in PUBLIC and not s.namespace]
    assert not wrong, f"give these folders another name than a function's: {wrong}"


def test_imports_go_down():
    out = modules()
    wrong = [line for name, path in out.items() for line in violations(name, path, out)]
    assert not wrong, "\n".join(wrong)


#: Circles that are being opened (issue 61).
OPEN_CIRCLES = [
    ["model.parallel.forwards", "model.patch.forwards.layers"],
]


def test_the_import_graph_has_no_circles():
    graph = dict(import_graph())
    del graph["__init__"]  # which loads public names at their first use
    graph = {name: targets & set(graph) for name, targets in graph.items()}
    left = [c for c in circles(graph) if c not in OPEN_CIRCLES]
    assert len(graph) > 100 and left == []
    graph["errors"] = graph["errors"] | {"gemm.api"}
    (planted,) = [c for c in circles(graph) if c not in OPEN_CIRCLES]
    assert {"errors", "gemm.api", "gemm.op"} <= set(planted)


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("cutlass", {"dsl", "compile", "verify", "schedulers.device", "system.kernel"}),
        ("triton", {"runtime", "system.kernel"}),
        ("tests", set()),
        ("perf", set()),
    ],
)
def test_who_imports_compilers_tests_and_benchmarks(package: str, allowed: set[str]):
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
            assert own <= {"errors", "lazy"}, f"{name} imports {own}"


def test_certificates_are_not_for_run_time():
    importers = {
        name
        for name, targets in import_graph().items()
        if any(target.startswith("verify.") for target in targets)
    }
    assert all(name.startswith("verify.") for name in importers)


def test_the_page_shows_these_imports():
    page = runpy.run_path(str(ROOT / "tools" / "map.py"))
    current = page["PAGE"].read_text(encoding="utf-8") == page["page"]()
    assert current, "docs/imports.md is not up to date: python tools/map.py --write"


def test_tests_of_a_system_import_no_other_systems_tests():
    wrong = []
    for file in sources():
        top, _, rest = file.name.partition("/")
        mine = rest.partition("/")[0]
        if top == "tests" and mine in FOLDERS:
            theirs = set(re.findall(r"^ *from tests\.(\w+)", file.text, re.M)) & FOLDERS - {mine}
            wrong += [(file.name, sorted(theirs))] * bool(theirs)
    assert not wrong


#: Imports that go up, sideways, or from one system into another, in either direction.
PLANTED = [
    ("gemm.config", "from . import launch"),
    ("gemm.kernel_sm90", "from .launch import gemm"),
    ("errors", "from . import settings"),
    ("contracts", "if TYPE_CHECKING:\n    from .gemm import api"),
    ("gemm.config", "importlib.import_module(f'{__package__}.launch')"),
    ("arch", "import cute_kernels.gemm.api"),
    ("compile.cache", "from ..gemm import config"),
    ("compile.cache", "from verify import sass"),
    ("gemm.launch", "from ..sparse_attn import masks"),
    ("gemm.kernel_sm90", "from ..sparse_attn.device import walk"),
    ("sparse_attn.kernel_fwd_sm90", "from ..gemm.kernel_sm90 import GemmSm90"),
    ("gemm.triton.launch", "from ...sparse_attn.triton import plan"),
    ("sparse_attn.api", "from cute_kernels.gemm import config"),
    ("dsl.mma", "from ..sparse_attn.device import slope"),
    ("gemm.api", "from ..model.audit import api"),
    ("integrations.transformers", "from ..model.audit import probe"),
    ("model.observe.rows", "from ...demo import model"),
    ("schedulers.tiles.raster", "from cute_kernels.runtime import caching"),
]


@pytest.mark.parametrize(("name", "line"), PLANTED)
def test_a_planted_import_is_found(tmp_path: Path, name: str, line: str):
    planted = tmp_path / "planted.py"
    planted.write_text(line)
    assert violations(name, planted, modules()), f"{name}: {line}"
