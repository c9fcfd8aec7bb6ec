"""Plans and contract ids: a function of what they should depend on, and of nothing else."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels import arch, contracts
from cute_kernels.gemm import config, launch

TUNE = Path(__file__).parents[2] / "perf" / "results" / "tune.jsonl"


#: The one function that may read a number of rows: it chooses who adds, not in which order.
CHOOSES_THE_TILE = "tile_columns"
NUMBERS_OF_ROWS = {"m", "M", "rows", "tokens", "shape", "numel", "size", "multi_processor_count"}


def readers_of_m(source: str) -> set[str]:
    """The functions of a source that take, or name, a number of rows or the function that may."""
    found = set()
    for function in (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)):
        names = {n.arg for n in ast.walk(function) if isinstance(n, ast.arg)}
        names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(function) if isinstance(n, ast.Attribute)}
        if names & {*NUMBERS_OF_ROWS, CHOOSES_THE_TILE}:
            found.add(function.name)
    return found


def test_the_order_cannot_read_m():
    """No function of config.py but one sees a number of rows, and none of them asks that one."""
    source = inspect.getsource(config)
    assert readers_of_m(source) == {CHOOSES_THE_TILE}
    by_m = source.replace("(DTYPE_NAMES[dtype]", "(DTYPE_NAMES[dtype] if tokens > 9 else 'fp32'")
    asks = source.replace("tile_n=tile_n)", "tile_n=tile_columns(1, 1, 1))")
    assert by_m != source != asks
    assert readers_of_m(by_m) == readers_of_m(asks) == {CHOOSES_THE_TILE, "choose"}


def test_the_tile_changes_nothing_else():
    """Two tiles of one product are one plan but for the width."""
    for width in config.TILE_COST:
        chosen = config.choose(torch.bfloat16, "k", "mn", "bias", width)
        assert chosen.tile_n == width
        wide = config.choose(torch.bfloat16, "k", "mn", "bias")
        assert dataclasses.replace(chosen, tile_n=wide.tile_n) == wide


@pytest.mark.parametrize(("n", "widths"), [(72, 1), (136, 1), (4096, 2), (12288, 2)])
def test_only_the_width_of_the_kernel_follows_m(n, widths, monkeypatch):
    """What the launcher asks for, at many numbers of rows: one kernel per width."""
    asked = set()
    monkeypatch.setattr(launch, "max_clusters", lambda device: 66)
    monkeypatch.setattr(launch, "call", lambda *args: None)
    monkeypatch.setattr(launch, "_gemm_kernel", lambda *chosen: asked.add(chosen))
    weight = torch.empty(n, 16, dtype=torch.bfloat16)
    for m in (*range(1, 40), *range(255, 2100, 64), 4096):
        launch.gemm(torch.empty(m, 16, dtype=torch.bfloat16), weight, None, None)
    fixed = {(*chosen[:4], *chosen[5:]) for chosen in asked}
    assert fixed == {(torch.bfloat16, "k", "k", "plain", config.ORDER)}
    assert len(asked) == widths


#: (rows, columns) -> width on the 66 clusters of an H200.
WIDTHS = {
    (1, 12288): 256,  # 48 tiles or 96: one wave beats two of half the width
    (512, 12288): 128,  # 96 or 192: two waves lose to three of half the width
    (512, 4096): 128,  # 32 or 64: one wave either way
    (513, 4096): 256,
    (1024, 12288): 256,
    (4096, 12288): 256,
    (4096, 4096): 256,
    (4096, 32000): 256,
    (1, 128): 128,
    (1, 129): 128,
}


@pytest.mark.parametrize(("shape", "width"), WIDTHS.items())
def test_the_tile_of_known_shapes(shape, width):
    assert config.tile_columns(*shape, 66) == width


def predicted(width: int, rows: int, columns: int, clusters: int) -> float:
    """Waves times the cost of a tile, counted tile by tile."""
    tiles = sum(1 for _ in range(0, rows, 256) for _ in range(0, columns, width))
    return len(range(0, tiles, clusters)) * width * config.TILE_COST[width]


def test_no_tile_would_be_faster():
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        rows, columns, clusters = (
            int(torch.randint(1, most, (1,), generator=generator)) for most in (9000, 9000, 80)
        )
        time = {w: predicted(w, rows, columns, clusters) for w in config.TILE_COST}
        assert time[config.tile_columns(rows, columns, clusters)] == min(time.values())


def test_the_widest_of_equals_is_taken(monkeypatch):
    monkeypatch.setattr(config, "TILE_COST", dict.fromkeys(config.TILE_COST, 1.0))
    assert config.tile_columns.__wrapped__(4096, 4096, 1) == max(config.TILE_COST)


def test_the_memory_of_choices_is_bounded():
    assert config.tile_columns.cache_info().maxsize is not None


def test_the_costs_are_the_measured_ones():
    """The model predicts each recorded width, relative to the shipped one, within 1%."""
    records = [json.loads(line) for line in TUNE.read_text().splitlines()]
    medians = {(r["shape"], r["system"]): r["median_us"] for r in records}
    seen = 0
    for r in records:
        name = r["system"].removeprefix("ours[tile_n=").removesuffix("]")
        if not name.isdigit() or int(name) not in config.TILE_COST:
            continue
        times = [predicted(w, r["m"], r["n"], 66) for w in (int(name), config.Config.tile_n)]
        measured = r["median_us"] / medians[r["shape"], "ours[]"]
        assert abs(times[0] / times[1] / measured - 1) < 0.01
        seen += 1
    assert seen >= 2


def test_the_catalogue_is_complete_and_distinct():
    found = list(config.catalogue())
    assert len(found) == len(set(found)) == 48
    for one in found:
        dtype = {name: dtype for dtype, name in config.DTYPE_NAMES.items()}[one.dtype]
        chosen = config.choose(dtype, one.a_major, one.b_major, one.epilogue, one.tile_n)
        assert chosen == one
    assert {one.tile_n for one in found} == set(config.TILE_COST)


@pytest.fixture
def sm90(monkeypatch):
    """A machine whose cuda:0 is an H200, as far as facts go."""
    h200 = arch.Device("cuda:0", "cuda", "sm_90a", 132)
    describe = arch.describe
    monkeypatch.setattr(
        arch, "describe", lambda d: h200 if torch.device(d).type == "cuda" else describe(d)
    )


def ids():
    found = {}
    for op in ("linear", "matmul"):
        for device, dtype in (
            ("cpu", torch.bfloat16),
            ("cuda:0", torch.bfloat16),
            ("cuda:0", torch.float32),
        ):
            found[op, device, dtype] = ck.contract_id(op, device, dtype)
    return found


def test_ids_name_op_backend_and_arch(sm90):
    found = ids()
    assert found["linear", "cuda:0", torch.bfloat16].startswith("linear/cute_sm90/sm_90a/")
    assert found["linear", "cuda:0", torch.float32].startswith("linear/triton/sm_90a/")
    assert found["matmul", "cpu", torch.bfloat16].startswith("matmul/cpu/")
    assert len(set(found.values())) == len(found)


CONSTANTS = [
    *(("SM90", "Config", f.name) for f in dataclasses.fields(config.Config)[5:]),
    *(("TRITON", "TRITON", f.name) for f in dataclasses.fields(config.TRITON)),
    *(("TRITON", "TRITON_FP32", f.name) for f in dataclasses.fields(config.TRITON)),
    *(("CPU", "CPU", f.name) for f in dataclasses.fields(config.CpuPlan)),
    *(("SM90", "COLUMN_SUM", f.name) for f in dataclasses.fields(config.ColumnSumPlan)),
]


def changed(value):
    if isinstance(value, bool):
        return not value
    return value + "x" if isinstance(value, str) else value + 1


@pytest.mark.parametrize(("backend", "plan", "name"), CONSTANTS)
def test_every_constant_is_in_the_id(sm90, monkeypatch, backend, plan, name):
    before = ids()
    if plan == "Config":
        default = {f.name: f.default for f in dataclasses.fields(config.Config)}[name]
        choose = config.choose
        monkeypatch.setattr(
            config,
            "choose",
            lambda *a: dataclasses.replace(choose(*a), **{name: changed(default)}),
        )
    else:
        value = getattr(config, plan)
        new = dataclasses.replace(value, **{name: changed(getattr(value, name))})
        monkeypatch.setattr(config, plan, new)
    after = ids()
    touched = {key for key in before if before[key] != after[key]}
    device, dtype = {
        "SM90": ("cuda:0", torch.bfloat16),
        "TRITON": ("cuda:0", torch.float32),
        "CPU": ("cpu", torch.bfloat16),
    }[backend]
    assert ("linear", device, dtype) in touched
    other = "cpu" if device != "cpu" else "cuda:0"
    assert ("linear", other, torch.bfloat16) not in touched


def test_every_tile_is_in_the_id_and_no_cost_of_one(sm90, monkeypatch):
    before = ids()
    plan = config.plan(arch.CUTE_SM90, arch.describe("cuda:0"))
    assert [tile["tile_n"] for tile in plan["tiles"].values()] == list(config.TILE_COST)
    assert all(f"m64n{width}k16" in plan["family"] for width in config.TILE_COST)
    monkeypatch.setattr(config, "TILE_COST", {256: 1.0, 128: 1.5})
    assert ids() == before
    for widths in ({256: 1.0}, {256: 1.0, 128: 1.02, 64: 1.1}):
        monkeypatch.setattr(config, "TILE_COST", widths)
        after = ids()
        touched = {key for key in before if before[key] != after[key]}
        assert touched == {(op, "cuda:0", torch.bfloat16) for op in ("linear", "matmul")}


@pytest.mark.parametrize("name", ["ORDER", "K_GROUP"])
def test_the_order_is_in_every_id(sm90, monkeypatch, name):
    before = ids()
    monkeypatch.setattr(config, name, changed(getattr(config, name)))
    after = ids()
    assert all(before[key] != after[key] for key in before)


@pytest.mark.parametrize(
    ("backend", "distribution", "key"),
    [
        (arch.CUTE_SM90, "nvidia-cutlass-dsl-libs-cu13", ("linear", "cuda:0", torch.bfloat16)),
        (arch.TRITON, "triton", ("linear", "cuda:0", torch.float32)),
        (arch.CPU, "torch", ("linear", "cpu", torch.bfloat16)),
    ],
)
def test_the_toolchain_is_in_the_id(sm90, monkeypatch, backend, distribution, key):
    before, version = ids(), arch.version
    monkeypatch.setattr(
        arch, "version", lambda name: "9.9" if name == distribution else version(name)
    )
    after = ids()
    assert {k for k in before if before[k] != after[k]} == {k for k in before if _on(k, key)}


def _on(key, like) -> bool:
    return key[1:] == like[1:]


def test_nothing_else_is_in_the_id(sm90, monkeypatch):
    before = ids()
    monkeypatch.setenv("CUTE_KERNELS_MAX_CTAS", "7")
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    torch.use_deterministic_algorithms(True)
    try:
        assert ids() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_thread_count_is_in_the_cpu_id():
    before = torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.add(ck.contract_id("linear", "cpu"))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 2


def test_guarantees(sm90):
    on_gpu = ck.guarantees("linear", "cuda:0")
    assert on_gpu == {"run_to_run", "batch_invariant", "split_invariant", "schedule_invariant"}
    assert ck.guarantees("linear", "cpu") == on_gpu - {"schedule_invariant"}
    assert on_gpu <= set(contracts.MEANING)


def test_unordered_variants_raise_under_the_flag():
    contracts.refuse_if_deterministic("x", "y")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ck.errors.NondeterministicError, match="use y"):
            contracts.refuse_if_deterministic("x", "y")
    finally:
        torch.use_deterministic_algorithms(False)
