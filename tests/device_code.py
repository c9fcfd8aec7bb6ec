"""Files whose functions the DSL traces into kernels."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICE = re.compile(
    r"^cute_kernels/(dsl/\w+|\w+/device/\w+|\w+/kernel(_\w+)?_sm90)\.py$"
    r"|^schedulers/.*_device\.py$"
)


def folder(name: str) -> str:
    """Folder of a device file, or '' if it is not device code."""
    if not DEVICE.match(name):
        return ""
    if name.startswith("schedulers/"):
        return "schedulers"
    return "/".join(name.split("/")[:2])


def device_files() -> dict[str, Path]:
    """Device files of the checkout, by their names in it."""
    files = {}
    for root in ("cute_kernels", "schedulers"):
        for path in sorted((ROOT / root).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if folder(name):
                files[name] = path
    return files
