"""`python -m perf headline`: the README's table of speed, from one run of one commit on one card.

A row (`SPEED` of the systems' pages) is measured at the fewest sizes that carry its claim; `show`
prints what longer runs found at others.  The file holds one run a card, and nothing else makes the
tables: a row that the run did not reach says "not run".
"""

from __future__ import annotations

import json
from pathlib import Path

from cute_kernels.cli.common import writing

from .core import record
from .core.models import model, split
from .core.stage import Stage
from .core.tables import commit_of

FILE = record.RESULTS / "headline.jsonl"

#: (`perf bench` command, seconds it may take, why these sizes), the longest known claims first.
COMMANDS = (
    (
        "gemm --shape qkv,mlp_down,lm_head --rivals ours,cublas",
        90,
        "a usual, a long and a wide product; the two shapes left out lie between them",
    ),
    (
        "decode --group few --shape qkv,mlp_down",
        60,
        "1 to 128 rows of a product short and long in K; a head reads the same way, for longer",
    ),
    (
        "logp --shape 128k --passes both --no-decode --rivals ours,liger,quack",
        60,
        "the vocabulary of Llama 3; 152k has the same tiles",
    ),
    (
        "mhc --list sizes --op site --shape 8192x4096,8192x7168 --rivals ours,te",
        60,
        "a usual number of tokens, the widths of the paper's two models",
    ),
    (
        "moe --shape qwen3-30b-a3b,mixtral-8x7b --tokens 16,4096 --product fwd,dx,dw --load zipf"
        " --rivals ours,torch",
        90,
        "small and large experts, a decoding and a training batch, loads as routers make them",
    ),
    (
        "norm --op rms_norm,layer_norm --size 8192x4096,32768x2048 --rivals ours,quack,liger",
        60,
        "a wide and a narrow row; the outliers of status are heads of 128",
    ),
    (
        "attention --mask full,causal,window,document --s 8192 --d 128 --heads 16 --group 1"
        " --systems ours,fa4,cudnn",
        120,
        "four masks at the length and head size of training; status has D = 64, 192, 256",
    ),
    (
        "model --parts host,training --systems torch,ours",
        120,
        "a Llama of hidden 2048; what a call costs the host",
    ),
)


def stages(output: Path, commit: str | None) -> list[Stage]:
    """Every command as a process of its own, which appends to ``output``."""
    mark = ("--commit", commit) if commit else ()
    return [
        Stage(
            command.split()[0],
            ("-m", "perf", "bench", *command.split(), "-o", str(output), *mark),
            limit_s,
        )
        for command, limit_s, _ in COMMANDS
    ]


def begin(path: Path, card: str) -> None:
    """Drops the older run of a card from the file."""
    records = record.read(path) if path.is_file() else []
    others = [json.dumps(r, sort_keys=True) + "\n" for r in records if model(r["gpu"]) != card]
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_text("".join(others))


def runs(path: Path = FILE) -> dict[str, list[dict]]:
    """GPU model -> the records of its run.

    Errors: RecordError for a run of two commits or of two states of the source.
    """
    records = record.read(path) if path.is_file() and path.stat().st_size else []
    out = {}
    for card, run in split(records).items():
        if len({(r["commit"], r["source"]) for r in run}) > 1:
            raise record.RecordError(f"{path}: the run of {card} is of more than one commit")
        if run:
            out[card] = run
    return out


def origin(run: list[dict]) -> str:
    """Where a run was taken: GPU, commit, day."""
    first = min(run, key=lambda r: r["date"])
    return f"{first['gpu']}, `{commit_of(first)}`, {first['date'][:10]}"
