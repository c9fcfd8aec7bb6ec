"""`python -m perf report`: docs/status.md, docs/status/ and the plots, from the records alone.

`pages` is a pure function of the records and the certificates, both of which are in the repository
(perf/results/), so a test can tell whether the pages are up to date.  What no record supports says
"not run".
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

from cute_kernels.cli.common import writing

from . import verdict
from .core import record
from .core.models import split
from .core.section import wrapped
from .core.systems import SYSTEMS, modules, name_of
from .core.tables import certified, table
from .digest import page as digests
from .probes import page as probes

STATUS = record.ROOT / "docs" / "status.md"
CERTIFICATES = record.RESULTS / "certificates.json"
#: What `python -m verify` writes; either name.
BUILT = tuple(record.ROOT / "certify" / name for name in ("certificates.json", "report.json"))
_LEGEND = """
A target is met or missed by the newest records of that GPU; "not run": there is no record. A ratio
is the rival's time over ours: above 1 ours is faster. A `+` after a commit: the tree had changes.
"""
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
    certificates = json.loads(fresh[0].read_text())
    facts = [{k: item[k] for k in _FIELDS if k in item} for item in certificates]
    anew = {_system(item["name"]) for item in certificates}
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


def _kernels(certificates: list[dict]) -> list[str]:
    """The page of every kernel that a system names or that has a certificate."""
    system_kernels = [name for page in modules("page") for name in page.KERNELS]
    names = dict.fromkeys((*system_kernels, *(c["name"] for c in certificates)))
    rows = [[f"`{name}`", *certified(certificates, name)] for name in names]
    return [
        "# Kernels",
        "",
        "Compiled for sm_90a; a [certificate](../certificate.md) is what the compiled code proves",
        "about order.",
        "",
        *table(["kernel", "compiled", "certified"], rows),
    ]


def _system_page(page: ModuleType, records: list[dict]) -> list[str]:
    lines = [f"# {page.TITLE}: status", "", *verdict.of_system(page, records), ""]
    lines += ["Back to [the index](../status.md).  A ratio is the rival's time over ours.", ""]
    return lines + [line for section in page.SECTIONS for line in section.render(records)]


def _index(records: list[dict], certificates: list[dict]) -> list[str]:
    return [
        "# Status",
        "",
        *verdict.index(records),
        "",
        f"- [Same bits on H100 and H200](status/digests.md): {verdict.agreed(records)}.",
        f"- [Certificates of the compiled kernels](status/kernels.md): "
        f"{verdict.certified(certificates)}.",
        "- [Questions for the hardware](status/probes.md), and what each GPU answered.",
        "",
        *wrapped(_LEGEND),
        "",
        "## Renew",
        "",
        "Written by `python -m perf report` from `perf/results/`; do not edit.  On the GPU:",
        "",
        "```sh",
        "python -m perf bench gemm        # or decode, attention, logp, mhc, moe, norm, model, rl",
        "python -m perf report            # this page, those of the systems, the README's table",
        "python -m perf prune             # keeps the newest record of each case and GPU",
        "```",
    ]


def pages(records: list[dict], certificates: list[dict]) -> dict[str, str]:
    """Path below docs/ -> text of the index, of each system's page and of those of all systems."""
    lines_by_path = {
        "status.md": _index(records, certificates),
        "status/digests.md": digests.render(records),
        "status/kernels.md": _kernels(certificates),
        "status/probes.md": probes.render(records),
    }
    for page in modules("page"):
        lines_by_path[f"status/{name_of(page)}.md"] = _system_page(page, records)
    return {path: "\n".join(lines).rstrip("\n") + "\n" for path, lines in lines_by_path.items()}


def write(records: list[dict], certificates: list[dict], index: Path = STATUS) -> list[Path]:
    """Write every page: the index to this path, the others below the folder of its name."""
    paths = []
    for name, text in pages(records, certificates).items():
        path = index if name == "status.md" else index.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path):
            path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def draw(records: list[dict], folder: Path) -> list[Path]:
    """Every plot that the records of each GPU model support; the paths written."""
    cards = split(records).values()
    return [
        path
        for page in modules("page")
        for model_records in cards
        for path in page.plots(model_records, folder)
    ]
