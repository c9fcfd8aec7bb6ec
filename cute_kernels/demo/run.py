"""The demo, end to end: train, roll out, train again, compare, print, draw."""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import json
import math
import time
from collections.abc import Iterator
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
    seconds = SECONDS[target.type] if seconds is None else seconds
    with compiling(target, order), _one_cpu_thread(target):
        return _demo(out, target, seconds, seed, steps, setup, order)


def _demo(
    out: Path,
    device: torch.device,
    seconds: float,
    seed: int,
    steps: int | None,
    setup: Setup | None,
    order: str,
) -> int:
    from . import compare, model, report, rollout, training  # and transformers: seconds

    setup, console, begin = setup or compare.Setup(), Console(), time.monotonic()
    say = functools.partial(console.print, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    learn, unseen = training.split(training.corpus())
    ours = model.ours(setup.size, device, seed, order)
    threads = f", {torch.get_num_threads()} thread" if device.type == "cpu" else ""
    say(f"{device}{threads}, torch {torch.__version__}")
    for op in _OPS:
        say(ck.contract_id(op, device))
    weights = sum(weight.numel() for weight in ours.model.parameters())
    console.print(f"a Llama of {weights:,} bf16 weights, {len(learn):,} bytes of text to learn")
    with _bars(console) as bars:
        task = bars.add_task("train", total=1.0, note="")
        trained = training.train(
            ours,
            learn,
            seconds=seconds,
            steps=steps,
            seed=seed,
            progress=lambda done, words: bars.update(task, completed=done, note=words),
        )
        # Ours samples the tokens; torch's ops score the same ones.
        work, columns = compare.tasks(setup, unseen, seed), []
        passes, choose = len(setup.batchings) + len(setup.splits), rollout.sample(seed, len(work))
        for side in (ours, model.plain(ours, setup.size)):
            row = bars.add_task(f"roll out and score: {side.name}", total=passes, note="")
            advance = functools.partial(bars.advance, row)
            column, tokens = compare.measure(side, setup, work, choose, seed, advance)
            columns.insert(0, column)
            choose = rollout.replay(tokens)
    console.print(
        f"trained {trained.steps} steps ({trained.tokens:,} bytes) in {trained.seconds:.0f} s "
        "through a patched model and ck.linear_logp: "
        f"{trained.first_loss:.2f} -> {trained.last_loss:.2f} nats per byte"
    )
    prompt = setup.prompts[0]
    asked, answer = training.decode(tokens[0][:prompt]), training.decode(tokens[0][prompt:])
    say(f"it continues {asked[-40:]!r}\n  with {answer!r}", markup=False)
    console.print(report.table(*columns))
    for path in report.drift(columns, out):
        say(f"wrote {path}")
    say(f"{time.monotonic() - begin:.0f} s in all")
    if device.type == "cpu":
        say("the CPU backend is for tests: times on a GPU are in docs/costs.md")
    for line in report.verdict(*columns):
        say(line)
    return BROKEN if columns[-1].total().differing_bytes else 0


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
