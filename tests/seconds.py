"""Seconds of each test file in the last recorded run: the order in which workers take files.

make test PYTEST_ADDOPTS=--junitxml=run.xml && python -m tests.seconds run.xml
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

STORED = Path(__file__).with_name("seconds.json")
#: Files below are not stored: their order does not matter.
LEAST = 1.0


@functools.cache
def recorded() -> dict[str, float]:
    """File -> seconds of its tests; empty where nothing was recorded."""
    return json.loads(STORED.read_text()) if STORED.is_file() else {}


def of_run(junit: Path) -> dict[str, float]:
    """File -> seconds of its tests, set-up and tear-down in a run, the longest first."""
    total: Counter[str] = Counter()
    for case in ElementTree.parse(junit).iter("testcase"):
        # The class name is the module, and the class in it if there is one: ours have none.
        total[case.get("classname", "").replace(".", "/") + ".py"] += float(case.get("time", 0))
    return {file: round(s, 1) for file, s in total.most_common() if s >= LEAST}


if __name__ == "__main__":
    STORED.write_text(json.dumps(of_run(Path(sys.argv[1])), indent=0) + "\n")
