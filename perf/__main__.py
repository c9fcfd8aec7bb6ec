"""The command line: python -m perf bench | digest | soak | tune | profile | probe | report | ..."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .core import record
from .gemm import targets

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench_app = typer.Typer(no_args_is_help=True, help="Time kernels against their rivals.")
profile_app = typer.Typer(no_args_is_help=True, help="Hardware counters through Nsight Compute.")
app.add_typer(bench_app, name="bench")
app.add_typer(profile_app, name="profile")
soak_app = typer.Typer(no_args_is_help=True, help="The same bytes, thousands of times.")
sanitize_app = typer.Typer(no_args_is_help=True, help="Small cases under compute-sanitizer.")
app.add_typer(soak_app, name="soak")
app.add_typer(sanitize_app, name="sanitize")

Commit = Annotated[str | None, typer.Option(help="the commit, where the tree has no .git")]


def _need_gpu(what: str) -> None:
    """One line and exit code 2 where there is no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        typer.echo(f"perf {what}: needs a CUDA GPU; torch {torch.__version__} sees none")
        raise typer.Exit(2)


def _chosen(option: str, text: str, allowed) -> list[str]:
    """A comma-separated option as a list of known names."""
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{option}: expected {', '.join(allowed)}; got {name!r}")
    return names


def _numbers(option: str, text: str) -> list[int]:
    parts = [part for part in text.split(",") if part]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option}: expected whole numbers above 0, got {text!r}")
    return [int(part) for part in parts]


@bench_app.command("gemm")
def bench_gemm(
    shape: Annotated[str, typer.Option(help="qkv,o_proj,...; default: the status page's")] = "",
    m: Annotated[str, typer.Option(help="row counts, 512,1024; default: each shape's own")] = "",
    product: Annotated[str, typer.Option(help="of fwd,dx,dw")] = ",".join(targets.PRODUCTS),
    rivals: Annotated[str, typer.Option(help="who is measured; see perf/gemm/rivals.py")] = "",
    rounds: Annotated[int, typer.Option(min=50, help="samples of each rival")] = 50,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    check_only: Annotated[bool, typer.Option(help="correctness and bits, no time")] = False,
    case: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="records on standard output")] = False,
    commit: Commit = None,
) -> None:
    """Checks every rival against float64, then times them in turns.  Appends one line per case."""
    _need_gpu("bench")
    from .gemm import bench
    from .gemm.rivals import DEFAULT, RIVALS

    names = _chosen("--rivals", rivals, RIVALS) or list(DEFAULT)
    shapes = _chosen("--shape", shape, targets.SHAPES)
    products = _chosen("--product", product, targets.PRODUCTS)
    todo = bench.cases(shapes, _numbers("--m", m), products)
    if case:
        fields = [text.split(":") for text in case]
        todo = [bench.cases([s], [int(rows)], [p])[0] for p, s, rows in fields]
    path = None if as_json else output or record.RESULTS / "gemm.jsonl"
    measured = bench.gemm(
        todo, names, output=path, rounds=rounds, check_only=check_only, commit=commit
    )
    failed = 0
    for body in measured:
        typer.echo(json.dumps(body) if as_json else bench.line(body))
        failed += body["system"] == "ours" and body["status"] != "ok"
    if failed:
        raise typer.Exit(1)


@bench_app.command("attention")
def bench_attention(
    mask: Annotated[str, typer.Option(help="of full,causal,window,document,prefix,random")] = "",
    s: Annotated[str, typer.Option(help="lengths; default: each mask's own")] = "",
    d: Annotated[str, typer.Option(help="head sizes, of 64,128")] = "",
    heads: Annotated[str, typer.Option(help="query heads, 16,32")] = "",
    group: Annotated[str, typer.Option(help="query heads of a KV head, 1,4")] = "",
    passes: Annotated[str, typer.Option("--pass", help="of fwd,bwd")] = "",
    systems: Annotated[str, typer.Option(help="who is measured; see perf/attention")] = "",
    quick: Annotated[bool, typer.Option(help="backward of D = 128, 16 heads; two minutes")] = False,
    rounds: Annotated[int, typer.Option(min=50, help="samples of each system")] = 50,
    budget: Annotated[float, typer.Option(help="seconds after which no case is begun")] = 380.0,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    check_only: Annotated[bool, typer.Option(help="short cases against float64, no time")] = False,
    commit: Commit = None,
) -> None:
    """Block-sparse attention: ordered, unordered, FA4, FlexAttention on the same masks."""
    _need_gpu("bench")
    from .attention import bench
    from .attention.cases import PASSES
    from .attention.rivals import SYSTEMS
    from .attention.suite import QUICK_SYSTEMS, chosen, options

    masks = _chosen("--mask", mask, targets.ATTENTION_MASKS)
    names = _chosen("--systems", systems, SYSTEMS)
    which = _chosen("--pass", passes, PASSES)
    sizes = {"s": s, "d": d, "heads": heads, "group": group}
    numbers = {name: _numbers(f"--{name}", text) for name, text in sizes.items()}
    todo = chosen(masks, quick=quick, **numbers)
    if not todo:
        raise typer.BadParameter("no case of the suite has these sizes")
    default = list(QUICK_SYSTEMS) if quick else list(SYSTEMS)
    which = which or (["bwd"] if quick else list(PASSES))
    run = options(names or default, which, by_default=not names, check_only=check_only)
    run.rounds, run.budget_s = rounds, budget
    failed = 0
    try:
        path = output or record.RESULTS / "attention.jsonl"
        for body in bench.measure(todo, run, output=path, commit=commit):
            typer.echo(body if isinstance(body, str) else bench.line(body))
            ours = not isinstance(body, str) and body["system"].startswith("ours")
            failed += ours and body["status"] != "ok"
    except bench.Lost as error:
        typer.echo(f"perf bench: the device is lost: {error}")
        raise typer.Exit(1) from None
    if failed:
        raise typer.Exit(1)


@soak_app.command("attention")
def soak_attention(
    only: Annotated[str, typer.Option(help="parts of case names: causal/,d128,unordered")] = "",
    repeats: Annotated[int | None, typer.Option(min=1, help="in place of each case's own")] = None,
    budget: Annotated[float, typer.Option(help="seconds after which no case is begun")] = 280.0,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    commit: Commit = None,
) -> None:
    """Forward and backward again and again under every disturbance: not one byte may differ."""
    _need_gpu("soak")
    from .attention import soak
    from .attention.bench import Lost
    from .attention.soak_cases import suite

    todo = suite(only)
    if not todo:
        raise typer.BadParameter(f"--only: no case's name has {only!r}")
    path, bodies = output or record.RESULTS / "soak.jsonl", []
    try:
        options = soak.on_the_card(repeats, budget)
        for body in soak.measure(todo, options, output=path, commit=commit):
            typer.echo(body if isinstance(body, str) else soak.line(body))
            bodies += [] if isinstance(body, str) else [body]
    except Lost as error:
        typer.echo(f"perf soak: the device is lost: {error}")
        raise typer.Exit(1) from None
    text, held = soak.verdict(bodies)
    typer.echo(text)
    if not held:
        raise typer.Exit(1)


@sanitize_app.command("attention")
def sanitize_attention(
    tools: Annotated[str, typer.Option(help="of memcheck,synccheck")] = "memcheck,synccheck",
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    commit: Commit = None,
) -> None:
    """compute-sanitizer over forward and backward of small cases, and over a planted error."""
    _need_gpu("sanitize")
    from .core import sanitize

    wanted = _chosen("--tools", tools, sanitize.TOOLS)
    path, good = output or record.RESULTS / "sanitize.jsonl", True
    for body in sanitize.attention(wanted, commit):
        record.append(path, body)
        typer.echo(sanitize.line(body))
        good &= body["status"] == "ok"
    if not good:
        raise typer.Exit(1)


@sanitize_app.command("target", hidden=True)
def sanitize_target(
    plant: Annotated[bool, typer.Option(help="a write beyond an allocation")] = False,
) -> None:
    """What compute-sanitizer runs."""
    _need_gpu("sanitize")
    from .core import sanitize

    sanitize.target(plant)


@app.command("tune")
def tune_gemm(
    kernel: Annotated[str, typer.Argument(help="gemm")] = "gemm",
    shape: Annotated[str, typer.Option()] = "qkv,mlp_down",
    product: Annotated[str, typer.Option(help="of fwd,dx,dw")] = "fwd",
    variant: Annotated[list[str] | None, typer.Option(help="tile_n=192,cluster_m=1")] = None,
    rounds: Annotated[int, typer.Option(min=50)] = 50,
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    commit: Commit = None,
) -> None:
    """Variants of a kernel's configuration: the same bits, then their times in turns."""
    _need_gpu("tune")
    from .gemm import bench, tune

    _chosen("KERNEL", kernel, ("gemm",))
    shapes = _chosen("--shape", shape, targets.SHAPES)
    products = _chosen("--product", product, targets.PRODUCTS)
    for case in bench.cases(shapes, [], products):
        chosen = list(variant) if variant else list(tune.VARIANTS)
        path = output or record.RESULTS / "tune.jsonl"
        typer.echo("\n".join(tune.write(case, chosen, path, rounds, commit)))


@profile_app.command("gemm")
def profile_gemm(
    shape: Annotated[str, typer.Option()] = "qkv",
    product: Annotated[str, typer.Option(help="one of fwd,dx,dw")] = "fwd",
    system: Annotated[str, typer.Option(help="whose kernel")] = "ours",
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    commit: Commit = None,
) -> None:
    """Counters of one launch: achieved against the floor, and where warps stall."""
    _need_gpu("profile")
    from .core import ncu
    from .gemm.rivals import RIVALS

    _chosen("--shape", shape, targets.SHAPES)
    _chosen("--product", product, targets.PRODUCTS)
    _chosen("--system", system, RIVALS)
    try:
        body = ncu.gemm(shape, product, system, commit)
    except ncu.ProfileError as error:
        typer.echo(f"perf profile: {error}")
        raise typer.Exit(2) from None
    record.append(output or record.RESULTS / "profile.jsonl", body)
    typer.echo("\n".join(ncu.lines(body)))


_ProfiledMasks = Annotated[str, typer.Option("--mask", help="of full,causal,window,...")]
_ProfiledDims = Annotated[str, typer.Option("--d", help="head sizes, of 64,128")]
_ProfiledPasses = Annotated[str, typer.Option("--pass", help="of fwd,bwd")]


def _profiled(mask: str, d: str, passes: str) -> tuple[list, list[str]]:
    """(cases, passes) of the options; one set of options is one set of launches in one order."""
    from .attention.cases import PASSES
    from .attention.profile import cases

    masks = _chosen("--mask", mask, targets.ATTENTION_MASKS)
    return cases(masks, _numbers("--d", d)), _chosen("--pass", passes, PASSES)


@profile_app.command("attention")
def profile_attention(
    mask: _ProfiledMasks = "full,causal,document",
    d: _ProfiledDims = "64,128",
    passes: _ProfiledPasses = "fwd,bwd",
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    commit: Commit = None,
) -> None:
    """Counters of the forward kernel and of the ordered backward's, 8k, 16 heads."""
    _need_gpu("profile")
    from .attention.profile import attention
    from .core import ncu

    todo = _profiled(mask, d, passes)
    try:
        bodies = attention(*todo, (mask, d, passes), commit)
    except ncu.ProfileError as error:
        typer.echo(f"perf profile: {error}")
        raise typer.Exit(2) from None
    for body in bodies:
        record.append(output or record.RESULTS / "profile.jsonl", body)
        typer.echo("\n".join(ncu.lines(body)))


@profile_app.command("attention-target", hidden=True)
def profile_attention_target(
    mask: _ProfiledMasks, d: _ProfiledDims, passes: _ProfiledPasses
) -> None:
    """What ncu runs."""
    _need_gpu("profile")
    from .attention.profile import target

    target(*_profiled(mask, d, passes))


@profile_app.command("target", hidden=True)
def profile_target(
    shape: Annotated[str, typer.Option()],
    product: Annotated[str, typer.Option()],
    system: Annotated[str, typer.Option()],
) -> None:
    """What ncu runs."""
    _need_gpu("profile")
    from .core import ncu

    ncu.target(shape, product, system)


@app.command()
def probe(
    names: Annotated[
        list[str], typer.Argument(help="smoke, width, zeros, model, promotion or all")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output")] = None,
    golden: Annotated[Path | None, typer.Option(help="folder of the golden vectors")] = None,
    commit: Commit = None,
) -> None:
    """Asks the card what its tensor cores do (docs: questions for the hardware)."""
    _need_gpu("probe")
    from .probes import runner

    wanted = list(runner.PROBES) if names == ["all"] else names
    _chosen("names", ",".join(wanted), runner.PROBES)
    bad = 0
    path = output or record.RESULTS / "probes.jsonl"
    for body in runner.run(wanted, output=path, golden=golden or runner.GOLDEN, commit=commit):
        typer.echo(runner.line(body))
        smoke = body["probe"] == "smoke" and body["case"] == "answer"
        bad += body.get("verdict") == "failed" or (smoke and body["verdict"] != "yes")
    if bad:
        raise typer.Exit(1)


@app.command()
def digest(
    check: Annotated[bool, typer.Option(help="compare with the records of equal ids")] = False,
    only: Annotated[str, typer.Option(help="parts of case names: linear/,fp16")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    results: Annotated[Path, typer.Option(help="folder of the records")] = record.RESULTS,
    output: Annotated[Path | None, typer.Option("-o", "--out", help="append here")] = None,
    commit: Commit = None,
) -> None:
    """SHA-256 of what fixed inputs give: equal contract ids must mean equal digests.

    Appends to perf/results/digests.jsonl; with --check, or on a CPU, to --out only.  --check ends
    with 1 if a digest differs from a record of its contract id, with 2 if none has such a record.
    """
    _chosen("--device", device, ("cuda", "cpu"))
    if device == "cuda":
        _need_gpu("digest")
    from cute_kernels.errors import BackendUnavailable

    from .digest import run
    from .digest.cases import chosen

    if not (todo := chosen(only)):
        raise typer.BadParameter(f"--only: no case's name has {only!r}")
    kept = not check and device == "cuda"
    path = output or (record.RESULTS / "digests.jsonl" if kept else None)
    verdicts = []
    try:
        known = record.read_all(results) if check else []
        for body in run.measure(todo, device, commit):
            verdicts.append(run.against(body, known))
            typer.echo(run.line(body, verdicts[-1] if check else None))
            if path:
                record.append(path, body)
    except (record.RecordError, BackendUnavailable) as error:
        typer.echo(f"perf digest: {error}")
        raise typer.Exit(2) from None
    if check:
        text, code = run.summary(verdicts)
        typer.echo(text)
        raise typer.Exit(code)


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="folder of the records")] = record.RESULTS,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="the page")] = None,
) -> None:
    """Writes docs/status.md and the plots beside it from the records."""
    from . import report as page
    from .gemm import plots

    try:
        records = record.read_all(results)
    except record.RecordError as error:
        typer.echo(f"perf report: {error}")
        raise typer.Exit(2) from None
    kept = results / page.CERTIFICATES.name
    page.adopt_certificates(kept)
    path = output or page.STATUS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.render(records, page.load_certificates(kept)))
    drawn = plots.write(records, path.parent / "plots")
    typer.echo(f"{path}: {len(records)} records; plots: {len(drawn) or 'none, nothing was timed'}")


@app.command()
def compare(a: Path, b: Path) -> None:
    """Exit code 1 if B is slower than A beyond their noise or lost a promise, 2 if unusable."""
    from .core.compare import Unusable
    from .core.compare import compare as compared

    try:
        rows, gone, new = compared(record.read(a), record.read(b))
    except (record.RecordError, Unusable) as error:
        typer.echo(f"perf compare: {error}")
        raise typer.Exit(2) from None
    table = Table("system", "product", "shape", "GPU", "A us", "B us", "change", "noise", "verdict")
    for row in rows:
        _, system, product, shape, _, gpu = row.key
        times = [f"{t:.1f}" if t else "-" for t in (row.before, row.after)]
        shares = ["-" if x is None else f"{x:+.1%}" for x in (row.change, row.noise)]
        table.add_row(system, product, shape, gpu, *times, *shares, row.verdict)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    for name, keys in (("only in A", gone), ("only in B", new)):
        for key in keys:
            typer.echo(f"{name}: {' '.join(key)}")
    if any(row.regressed for row in rows):
        raise typer.Exit(1)


@app.command()
def refit(
    results: Annotated[list[Path], typer.Argument(help="files of attention records")],
) -> None:
    """Fits the schedule model's constants to measured backwards.  Prints; changes no file."""
    from .attention import refit as fitting

    try:
        records = [item for path in results for item in record.read(path)]
    except record.RecordError as error:
        typer.echo(f"perf refit: {error}")
        raise typer.Exit(2) from None
    for text in fitting.lines(records):
        typer.echo(text)


@app.command()
def h200(
    out: Annotated[Path, typer.Option(help="folder of the results")],
    stages: Annotated[str, typer.Option(help="smoke,correctness,probes,pytest,tune,...")] = "",
    budget: Annotated[float, typer.Option(help="seconds that the whole call may take")] = 560.0,
    commit: Commit = None,
) -> None:
    """All the work for a lent GPU machine: stages in turn, each with a time limit, a table last."""
    _need_gpu("h200")
    from . import h200 as machine

    known = {stage.name: stage for stage in machine.stages(out.resolve(), commit)}
    wanted = _chosen("--stages", stages, known) or list(known)
    outcomes = machine.run([known[name] for name in wanted], out.resolve(), budget)
    typer.echo("\n".join(machine.tail(out.resolve(), outcomes)))
    for outcome in outcomes:
        head = f"{outcome.stage:<12} {outcome.status:<18} {outcome.seconds:7.1f} s"
        typer.echo(f"{head}  {outcome.last}")
    if any(outcome.status != "ok" for outcome in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m perf")
