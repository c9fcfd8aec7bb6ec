"""`python -m perf report`: docs/status.md and the plots, from the records and nothing else.

`render` is a pure function of the records and the certificates, both of which are in the repository
(perf/results/), so a test can tell whether the page is up to date.  What no record supports says
"not run".
"""

from __future__ import annotations

import json
from pathlib import Path

from cute_kernels.cli.common import writing

from . import cards, verdict
from .core import record
from .core.systems import SYSTEMS, Page, modules
from .core.tables import certified, folded, table, where
from .digest import page as digests
from .probes import page as probes

STATUS = record.ROOT / "docs" / "status.md"
CERTIFICATES = record.RESULTS / "certificates.json"
#: What `python -m cute_kernels certify` writes; either name.
BUILT = tuple(record.ROOT / "certify" / name for name in ("certificates.json", "report.json"))
_FIELDS = ("name", "constexpr", "ok", "registers", "sass_sha256", "sources", "toolchain")


def load_certificates(path: Path = CERTIFICATES) -> list[dict]:
    """The committed copy of the certificates; none where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else []


def adopt_certificates(kept: Path = CERTIFICATES, built: tuple[Path, ...] = BUILT) -> bool:
    """Copies what is kept of a fresh certificate report (_FIELDS) into the repository.

    Of systems that the report has no kernel of, what the repository has stays.
    """
    fresh = [path for path in built if path.is_file()]
    if not fresh:
        return False
    made = json.loads(fresh[0].read_text())
    facts = [{k: item[k] for k in _FIELDS if k in item} for item in made]
    anew = {_system(item["name"]) for item in made}
    facts += [c for c in load_certificates(kept) if _system(c["name"]) not in anew]
    kept.parent.mkdir(parents=True, exist_ok=True)
    facts.sort(key=lambda item: json.dumps([item["name"], item.get("constexpr")]))
    with writing(kept):
        lines = ",\n".join(json.dumps(item, sort_keys=True) for item in facts)
        kept.write_text(f"[\n{lines}\n]\n")
    return True


def _system(kernel: str) -> str:
    """The system of a kernel's name, or the name."""
    names = (system.package for system in SYSTEMS)
    return next((name for name in names if kernel.startswith(f"{name}_")), kernel)


def _kernel_rows(pages: list[Page], certificates: list[dict]) -> list[list[str]]:
    """Every kernel that has a certificate, and those of the pages that have none."""
    own = [name for page in pages for name in page.KERNELS]
    names = dict.fromkeys((*own, *(c["name"] for c in certificates)))
    return [[f"`{name}`", *certified(certificates, name)] for name in names]


def _profile_rows(records: list[dict]) -> list[list[str]]:
    kept = {}
    for item in sorted((r for r in records if r["kind"] == "profile"), key=lambda r: r["date"]):
        kept[(item["system"], item["product"], item["shape"])] = item
    rows = []
    for key, item in sorted(kept.items()):
        # Words instead of one name each: a table's line breaks at spaces alone.
        stalls = ", ".join(
            f"{stall['reason'].replace('_', ' ')} {stall['warps']:.2f}" for stall in item["stalls"]
        )
        share = f"{item['floor_fraction']:.0%}"
        traffic = f"{item['bytes_over_least']:.2f}x"
        system, product, shape = key
        names = [system, f"{item['kernel']} {product}", shape.replace("/", " ")]
        rows.append([*names, share, traffic, stalls, where(item | {"status": "ok"})])
    return rows


def _profiles(records: list[dict]) -> list[str]:
    head = ["system", "product", "shape", "of floor", "traffic", "top stalls", "ran on"]
    rows = _profile_rows(records)
    return ["", "## Profiles", "", *folded(head, rows, ("system", "ran on"))] if rows else []


def render(records: list[dict], certificates: list[dict]) -> str:
    """The status page."""
    pages = list(modules("page"))
    kernels = ["kernel", "compiled", "certified"]
    out = [
        "# Status",
        "",
        *verdict.render(records, certificates),
        *(line for page in pages for line in page.images(records)),
        "",
        "Written by `python -m perf report` from `perf/results/`; do not edit.  A ratio is the",
        "rival's time over ours, so above 1 ours is faster.  What no record supports says",
        '"not run".  A `+` after a commit: the tree had changes.',
        "",
        "## What ran where",
        "",
        *cards.render(records),
        "",
        *digests.render(records),
        "",
        "## Kernels",
        "",
        *table(kernels, _kernel_rows(pages, certificates)),
        "",
        *(line for page in pages for line in (*page.render(records), "")),
        *probes.render(records),
        *_profiles(records),
    ]
    return "\n".join(out) + "\n"


def draw(records: list[dict], folder: Path) -> list[Path]:
    """Every plot that the records support; the paths written."""
    return [path for page in modules("page") for path in page.plots(records, folder)]
