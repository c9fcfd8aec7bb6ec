"""The public names of schedulers, whatever was imported before them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

from cute_kernels import schedulers


def test_every_public_name_is_what_it_says():
    for name, home in schedulers.HOMES.items():
        module = importlib.import_module(f"cute_kernels.schedulers.{home}")
        assert getattr(schedulers, name) is getattr(module, name), name


def test_no_submodule_has_the_name_of_a_function():
    """Else importing it would put the module in the function's place."""
    files = {path.stem for path in Path(schedulers.__file__).parent.glob("*.py")}
    assert not files & set(schedulers.__all__)


def test_names_survive_any_order_of_imports():
    code = (
        "import cute_kernels.schedulers.model.selection, cute_kernels.schedulers.order.safety;"
        "import cute_kernels as ck; s = ck.schedulers;"
        "print(all(callable(getattr(s, n)) for n in s.__all__))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "True", run.stderr
