"""The ``audit`` command: which module of a model lets its bits follow the batch.

python -m cute_kernels audit FOLDER --dtype bf16 --lengths 32,19,7
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..errors import ArgumentTypeError, ArgumentValueError, expected, one_of
from ..model.audit import api, checks, report
from ..runtime.optional import require
from .common import BROKEN, folded, one_line, renamed, writing

#: Values of --dtype; "auto" keeps the dtype that a model has.
_DTYPES = {
    "auto": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
#: Headings of the table, and the cells of a finding that stand below each other in a column.
_COLUMNS = (
    ("module\nclass", ("module", "class")),
    ("transform\nfirst", ("transform", "first")),
    ("bytes\nof", ("bytes", "of")),
    ("want\ngot", ("want", "got")),
)
_MODEL = "A folder, a hub's OWNER/NAME, or MODULE:FUNCTION, which returns a model."
_TRANSFORMS = f"Only these, with commas: {', '.join(checks.TRANSFORMS)}."


@one_line
def audit(
    model: Annotated[str, typer.Argument(help=_MODEL, show_default=False)],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A text (repeat the option); needs a tokenizer.")
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="Ids with commas (repeat the option).")
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="N,N,..", help="Lengths of random sequences.")
    ] = "32,19,7",
    seed: Annotated[int, typer.Option(help="Of random ids.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the best there is.")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")] = "auto",
    transforms: Annotated[
        str | None, typer.Option(metavar="NAMES", help=_TRANSFORMS, show_default="all that apply")
    ] = None,
    gradients: Annotated[bool, typer.Option(help="Compare gradients of parameters too.")] = True,
    compile: Annotated[bool, typer.Option("--compile", help="And torch.compile's bytes.")] = False,
    patch: Annotated[bool, typer.Option("--patch", help="Apply ck.patch to it first.")] = False,
    victims: Annotated[
        bool, typer.Option("--victims", help="List modules that only passed a difference on.")
    ] = False,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write JSON; - for the screen.")
    ] = None,
) -> None:
    """Name the modules of a model whose bits follow the batch, padding, chunks or a cache."""
    if dtype not in _DTYPES:
        raise ArgumentValueError(one_of("--dtype", _DTYPES, dtype))
    transform_names = (
        None if transforms is None else [name.strip() for name in transforms.split(",")]
    )
    if transform_names is not None:
        checks.names(transform_names)
    if prompt and tokens:
        raise ArgumentValueError(expected("--tokens", "--prompt or --tokens", "both"))
    sizes = _whole_numbers("--lengths", lengths, least=1)
    token_ids = [_whole_numbers("--tokens", text, least=0) for text in tokens or ()]
    if as_json is not None and str(as_json) != "-" and not as_json.absolute().parent.is_dir():
        raise ArgumentValueError(expected("--json", "a file in a folder that exists", as_json))
    _check_device(device)
    loaded = _load(model, dtype, device)
    if patch:
        _patched(loaded)
    inputs = token_ids or (_encoded(model, prompt) if prompt else _drawn(loaded, sizes, seed))
    options = {"transforms": transform_names, "gradients": gradients, "compile": compile}
    source = "--tokens" if token_ids else "--prompt" if prompt else "--lengths"
    with renamed(inputs=source):
        findings = api.audit(loaded, inputs, **options)
    if str(as_json) == "-":
        typer.echo(json.dumps(findings.as_json(victims), indent=1))
    else:
        show(findings, victims)
        if as_json is not None:
            with writing(as_json):
                as_json.write_text(json.dumps(findings.as_json(victims), indent=1) + "\n")
    raise typer.Exit(0 if findings.ok else BROKEN)


def show(findings: report.Report, victims: bool) -> None:
    """Print the first culprit, the table of all, and what was not compared."""
    typer.echo(folded(findings.headline()))
    if findings.findings:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for heading, names in _COLUMNS:
            side = "right" if set(names) <= set(report.NUMBERS) else "left"
            table.add_column(heading, justify=side, overflow="fold")
        for finding in findings.findings:
            texts = dict(zip(report.HEADER, report.cells(finding), strict=True))
            table.add_row(*("\n".join(texts[name] for name in names) for _, names in _COLUMNS))
        Console(highlight=False).print(table, markup=False)
    for finding in findings.victims if victims else ():
        name = finding.module or "(the model)"
        line = f"passed on: {name} ({finding.kind}) under {finding.transform}"
        typer.echo(folded(f"{line}: {finding.rows:,} rows"))
    for line in findings.lines():
        typer.echo(folded(line))


def _check_device(name: str | None) -> None:
    try:
        kind = torch.device(name or "cpu").type
    except RuntimeError:
        kind = None
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise ArgumentValueError(expected("--device", "cpu, or cuda where there is a GPU", name))


def _load(name: str, dtype: str, device: str | None) -> torch.nn.Module:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = _from_function(name) if _is_function(name) else _from_transformers(name)
    if _DTYPES[dtype] is not None:
        model = model.to(_DTYPES[dtype])
    return model.to(device)


def _is_function(name: str) -> bool:
    """Whether ``name`` is MODULE:FUNCTION, and no folder of such a name."""
    module, colon, function = name.partition(":")
    words = [*module.split("."), function]
    return bool(colon) and not Path(name).exists() and all(word.isidentifier() for word in words)


def _from_function(name: str) -> torch.nn.Module:
    module, _, function = name.partition(":")
    with _folder_of_the_user():
        make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        want = f"a function {function!r} in {module}"
        raise ArgumentValueError(expected("MODEL", want, type(make).__name__))
    model = make()
    if not isinstance(model, torch.nn.Module):
        want = f"{name} to return a torch.nn.Module"
        raise ArgumentTypeError(expected("MODEL", want, type(model).__name__))
    return model


@contextlib.contextmanager
def _folder_of_the_user():
    """Make modules of the current folder importable, as ``python -m`` finds them."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _could_be_on_a_hub(name: str) -> bool:
    """Whether ``name`` is OWNER/NAME and OWNER is no folder; one word is taken for a folder."""
    owner, slash, path = name.partition("/")
    return (
        bool(slash and path)
        and "/" not in path
        and owner not in ("", ".", "..", "~")
        and (not Path(owner).is_dir())
    )


def _from_transformers(name: str) -> torch.nn.Module:
    if not Path(name).is_dir() and not _could_be_on_a_hub(name):
        want = "a folder that exists, OWNER/NAME of a hub, or MODULE:FUNCTION"
        raise ArgumentValueError(expected("MODEL", want, f"{name!r}, which is not there"))
    require("demo", "transformers")
    import transformers

    try:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    except ValueError as error:  # a folder without a model, or with one of another kind
        raise ArgumentValueError(expected("MODEL", "a causal LM of transformers", error)) from None


def _patched(model: torch.nn.Module) -> None:
    import cute_kernels as ck

    ck.patch(model, main_grad=True)
    for module in model.modules():
        notes = getattr(module, "_cute_kernels", None)
        for parameter in module.parameters(recurse=False) if notes is not None else ():
            if parameter.requires_grad and not hasattr(parameter, "main_grad"):
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)


def _encoded(name: str, prompts: list[str]) -> list[list[int]]:
    if _is_function(name):
        want = "--tokens or --lengths for a model of a function: it has no tokenizer"
        raise ArgumentValueError(expected("--prompt", want, "--prompt"))
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    return [tokenizer(text)["input_ids"] for text in prompts]


def _drawn(model: torch.nn.Module, lengths: list[int], seed: int) -> list[torch.Tensor]:
    """Draw random ids of the model's vocabulary."""
    count = checks.vocabulary(model)
    if count is None:
        want = "--tokens for a model whose vocabulary cannot be seen (no nn.Embedding)"
        raise ArgumentValueError(expected("--lengths", want, "--lengths"))
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return [torch.randint(0, count, (n,), generator=generator, device="cpu") for n in lengths]


def _whole_numbers(name: str, text: str, least: int) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) >= least for word in words):
        want = f"whole numbers of at least {least} with commas between them"
        raise ArgumentValueError(expected(name, want, repr(text[:40])))
    return [int(word) for word in words]
