"""The demo, end to end: train, roll out, train again, compare, print, draw."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import cute_kernels as ck

from .. import about, arch
from ..cli.common import BROKEN, one_line
from ..compile import together
from ..compile.kernel import Kernel
from ..errors import ArgumentValueError, BackendUnavailable, expected, one_of
from ..gemm.config import ORDERS
from ..runtime import dispatch
from ..runtime.optional import require

if TYPE_CHECKING:
    from .compare import Setup
    from .model import Side

_NEEDS = ("transformers", "matplotlib")
_OPS = ("linear", "block_sparse_attention", "linear_logp")
#: How long to train, by device type, if nothing else is asked for.
SECONDS = {"cpu": 50.0, "cuda": 5.0}
_MAX_SEED = 2**31 - 1  # far below what torch takes: each sequence adds its number


@one_line
def demo(
    out: Annotated[Path, typer.Option("--out", "-o")] = Path("demo_output"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Training time; 50 on a CPU, 5 on a GPU.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps, instead of a time.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    order: Annotated[str, typer.Option(help="Of every linear layer: chain or tree.")] = "chain",
) -> None:
    """Train a small transformer on real text; compare rollout and training bits."""
    raise typer.Exit(main(out, device, seconds, seed, steps, order=order))


@dataclass(frozen=True)
class _Run:
    """The arguments of `main`, resolved."""

    out: Path
    device: torch.device
    seconds: float
    seed: int
    steps: int | None
    setup: Setup
    order: str


def main(
    out: Path,
    device: str | None,
    seconds: float | None,
    seed: int,
    steps: int | None = None,
    setup: Setup | None = None,
    order: str = "chain",
) -> int:
    """Runs the demo and prints it.

    Args:
        out: Folder for drift.png and drift.svg, made if missing.
        device: A torch device, or None: the GPU if there is one, else the CPU.
        seconds: How long to train, after the first step; None: as `SECONDS` has it.
        seed: Draws weights, training windows, prompts and samples.
        steps: Optimizer steps; if given, ``seconds`` is not read, and a run on the CPU repeats
            byte for byte.
        setup: Sizes and comparisons, if not the usual ones.
        order: The order of every linear layer: ``"chain"`` or ``"tree"``.

    Returns:
        The exit code: 0 if our column has 0 differing bytes, 1 if it has any.

    Raises:
        ArgumentValueError: ``seconds``, ``steps`` or ``seed`` is out of range; an unknown order.
        MissingPackageError: the extra ``demo`` is not installed.
        BackendUnavailable: the device has no backend, or is not there.
        OSError: ``out`` cannot be written.
    """
    if seconds is not None and not 0 < seconds < math.inf:
        raise ArgumentValueError(expected("seconds", "more than 0, and finite", seconds))
    if steps is not None and steps < 1:
        raise ArgumentValueError(expected("steps", "at least 1, or None", steps))
    if not 0 <= seed <= _MAX_SEED:
        raise ArgumentValueError(expected("seed", f"0 to {_MAX_SEED}", seed))
    if order not in ORDERS:
        raise ArgumentValueError(one_of("order", ORDERS, order))
    require("demo", *_NEEDS)
    target = _device(device)
    with compiling(target, order), _one_cpu_thread(target):
        from .compare import Setup  # and transformers, which takes seconds

        seconds = SECONDS[target.type] if seconds is None else seconds
        run = _Run(out, target, seconds, seed, steps, setup or Setup(), order)
        return _demo(run, Console())


def _demo(run: _Run, console: Console) -> int:
    from . import model, report, training

    run.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    learn, unseen = training.split(training.corpus())
    side = model.ours(run.setup.size, run.device, run.seed, run.order)
    _introduce(run, console, sum(weight.numel() for weight in side.model.parameters()), len(learn))
    with _bars(console) as bars:
        trained = _train(run, bars, side, learn)
        torch_column, ours, tokens = _measure(run, bars, side, unseen)
    console.print(
        f"trained {trained.steps} steps ({trained.tokens:,} bytes) in {trained.seconds:.0f} s "
        "through a patched model and ck.linear_logp: "
        f"{trained.first_loss:.2f} -> {trained.last_loss:.2f} nats per byte"
    )
    prompt = run.setup.prompts[0]
    asked, answer = training.decode(tokens[0][:prompt]), training.decode(tokens[0][prompt:])
    console.print(f"it continues {asked[-40:]!r}\n  with {answer!r}", markup=False, highlight=False)
    console.print(report.table(torch_column, ours))
    for path in report.drift((torch_column, ours), run.out):
        console.print(f"wrote {path}", highlight=False)
    console.print(f"{time.monotonic() - begin:.0f} s in all", highlight=False)
    if run.device.type == "cpu":
        console.print("the CPU backend is for tests: times on a GPU are in docs/costs.md")
    for line in report.verdict(torch_column, ours):
        console.print(line, highlight=False)
    return BROKEN if ours.total().differing_bytes else 0


def _introduce(run: _Run, console: Console, weights: int, learn: int) -> None:
    threads = f", {torch.get_num_threads()} thread" if run.device.type == "cpu" else ""
    console.print(f"{run.device}{threads}, torch {torch.__version__}", highlight=False)
    for op in _OPS:
        console.print(ck.contract_id(op, run.device), highlight=False)
    console.print(f"a Llama of {weights:,} bf16 weights, {learn:,} bytes of text to learn")


def _train(run: _Run, bars: Progress, side: Side, learn: torch.Tensor):
    from . import training

    task = bars.add_task("train", total=1.0, note="")
    return training.train(
        side,
        learn,
        seconds=run.seconds,
        steps=run.steps,
        seed=run.seed,
        progress=lambda done, words: bars.update(task, completed=done, note=words),
    )


def _measure(run: _Run, bars: Progress, ours: Side, unseen: torch.Tensor):
    """(torch's column, ours, the tokens): ours samples them, torch's ops score the same ones."""
    from . import compare, model, rollout

    work = compare.tasks(run.setup, unseen, run.seed)
    passes = len(run.setup.batchings) + len(run.setup.splits)
    scored = passes * sum(task.length - 1 for task in work)
    columns, choose = {}, rollout.sample(run.seed, len(work))
    for side in (ours, model.plain(ours, run.setup.size)):
        task = bars.add_task(f"roll out and score: {side.name}", total=scored, note="")
        columns[side.name], tokens = compare.measure(
            side, run.setup, work, choose, run.seed, functools.partial(bars.advance, task)
        )
        choose = rollout.replay(tokens)
    return columns["torch"], columns["ours"], tokens


def _device(name: str | None) -> torch.device:
    """The device asked for; BackendUnavailable if torch knows no such name or has no such GPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise BackendUnavailable(expected("device", "a device of torch", repr(name))) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        want = f"one of this machine's {torch.cuda.device_count()} GPUs, or cpu"
        raise BackendUnavailable(expected("device", want, device))
    for op in _OPS:
        ck.contract_id(op, device)  # refuses a device without a backend, by name
    return device


def _bars(console: Console) -> Progress:
    words = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    return Progress(*words, TextColumn("{task.fields[note]}"), console=console)


@contextlib.contextmanager
def _one_cpu_thread(device: torch.device):
    """Products this small gain little from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- kernels ------------------------------------------------------------------------------------


def known() -> list[Kernel]:
    """Every kernel there is."""
    return [kernel for kernel, _, _ in about.catalogue()]


def listed(order: str) -> list[Kernel]:
    """The kernels of a demo, in the order in which it asks for them.

    kernels.json is what `python -m tests.demo.gpu_kernels` found.  A kernel that it lacks, on a GPU
    of other SMs say, is compiled when it is asked for.
    """
    file = importlib.resources.files(__package__).joinpath("kernels.json")
    by_identity = {kernel.identity: kernel for kernel in known()}
    return [
        by_identity[json.dumps(identity)]
        for identity in json.loads(file.read_text(encoding="utf-8"))[order]
    ]


@contextlib.contextmanager
def compiling(device: torch.device, order: str) -> Iterator[None]:
    """Compile the listed kernels while the block imports and draws weights, on an SM90 device."""
    with contextlib.ExitStack() as block:
        if dispatch.backend("gemm", device, torch.bfloat16) == arch.CUTE_SM90:
            architecture = arch.describe(device).arch
            block.enter_context(
                together.compiling(listed(order), architecture, f"{__name__}:known")
            )
        yield
