"""Verbs of the command line, to which every system adds, and common options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from cute_kernels.cli.common import flushed, say

from . import record


class OneLine(typer.core.TyperGroup):
    """A group whose commands say in one line that a disk is full, with the file's name."""

    def invoke(self, ctx):
        try:
            with flushed():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            if error.filename is None:
                raise
            typer.echo(f"perf: {error.filename}: {error.strerror}", err=True)
            raise typer.Exit(2) from None


def _verb(text: str) -> typer.Typer:
    return typer.Typer(no_args_is_help=True, help=text, rich_markup_mode=None)


app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, cls=OneLine)
bench = _verb("Time kernels against their rivals.")
profile = _verb("Hardware counters through Nsight Compute.")
soak = _verb("The same bytes, thousands of times.")
sanitize = _verb("Small cases under compute-sanitizer.")
app.add_typer(bench, name="bench")
app.add_typer(profile, name="profile")
app.add_typer(soak, name="soak")
app.add_typer(sanitize, name="sanitize")

Commit = Annotated[str | None, typer.Option(help="the commit, where the tree has no .git")]
Output = Annotated[Path | None, typer.Option("-o", "--output")]
#: Of `profile`: ncu runs the same command line again, with this.
Target = Annotated[bool, typer.Option("--target", hidden=True, help="run what ncu profiles")]


def need_gpu(what: str) -> None:
    """One line and exit code 2 where there is no CUDA GPU."""
    import torch

    if not torch.cuda.is_available():
        typer.echo(f"perf {what}: needs a CUDA GPU; torch {torch.__version__} sees none")
        raise typer.Exit(2)


def chosen(option: str, text: str, allowed: Collection[str]) -> list[str]:
    """A comma-separated option as a list of known names."""
    names = [part for part in text.split(",") if part]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{option}: expected {', '.join(allowed)}; got {name!r}")
    return names


def numbers(option: str, text: str) -> list[int]:
    """A comma-separated option as whole numbers."""
    parts = [part for part in text.split(",") if part]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option}: expected whole numbers above 0, got {text!r}")
    return [int(part) for part in parts]


def stop(what: str, error: Exception | str, code: int = 2) -> typer.Exit:
    """One line about an error, and the exit to raise."""
    typer.echo(f"perf {what}: {error}")
    return typer.Exit(code)


def printed(what: str, found: Iterable[dict | str], line: Callable[[dict], str]) -> list[dict]:
    """Prints what a run yields; its records.  A lost device is one line and exit code 1."""
    from .watch import Lost

    bodies = []
    try:
        for body in found:
            say(body if isinstance(body, str) else line(body))
            bodies += [] if isinstance(body, str) else [body]
    except Lost as error:
        raise stop(what, f"the device is lost: {error}", 1) from None
    return bodies


def judged(
    what: str,
    found: Iterable[dict | str],
    line: Callable[[dict], str],
    is_ours: Callable[[dict], bool],
) -> None:
    """Prints what a run yields; exit code 1 if one of ours is not right or lost a promised bit."""
    ours = [body for body in printed(what, found, line) if is_ours(body)]
    if any(b["status"] == "failed" or not all(b.get("bitwise", {}).values()) for b in ours):
        raise typer.Exit(1)


def bench_suite(suite, todo: Iterable, rivals: str, **options) -> None:
    """Runs `passes.bench` with its options, by default with all rivals of the suite."""
    from . import passes

    names = chosen("--rivals", rivals, suite.rivals) or list(suite.rivals)
    options["output"] = options["output"] or record.RESULTS / f"{suite.kernel}.jsonl"
    found = passes.bench(suite, todo, names, **options)
    promised = {name for name, rival in suite.rivals.items() if rival.promised}
    judged("bench", found, passes.line, lambda body: body["system"] in promised)


def soaked(found: Iterable[dict | str]) -> None:
    """Prints a soak and its verdict; exit code 1 if it does not hold."""
    from . import soak as soaking

    text, holds = soaking.verdict(printed("soak", found, soaking.line))
    say(text)
    if not holds:
        raise typer.Exit(1)


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """One line and exit code 2 where ncu fails."""
    from . import ncu

    try:
        yield
    except ncu.ProfileError as error:
        raise stop("profile", error) from None


def counted(
    suite, todo: list, system: str, target: bool, output: Path | None, commit: str | None
) -> None:
    """Writes and prints the counters of cases; ``target``: runs the calls that ncu profiles."""
    from . import counters

    if target:
        counters.target(suite, todo, system)
        return
    with profiled():
        bodies = counters.profile(suite, todo, system, commit)
    for body in bodies:
        record.append(output or record.RESULTS / "profile.jsonl", body)
        say("\n".join(counters.lines(body)))


def sanitized(bodies: Iterable[dict], path: Path) -> None:
    """Writes and prints the records of compute-sanitizer; exit code 1 if one is not good."""
    from . import sanitize as sanitizing

    good = True
    for body in bodies:
        record.append(path, body)
        say(sanitizing.line(body))
        good &= body["status"] == "ok"
    if not good:
        raise typer.Exit(1)
