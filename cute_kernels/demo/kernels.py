"""The SM90 kernels of the demo, compiled while it is still importing and drawing weights.

kernels.json lists them by the order of linear layers, as `python -m tests.demo.gpu_kernels` found
them.  One that it lacks, on a GPU of other SMs say, is compiled when it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
from collections.abc import Iterator

import torch

from .. import about, arch
from ..compile import together
from ..compile.kernel import Kernel
from ..runtime import dispatch

FILE = "kernels.json"


def known() -> list[Kernel]:
    """Every kernel there is."""
    return [kernel for kernel, _, _ in about.catalogue()]


def listed(order: str) -> list[Kernel]:
    """The kernels of a demo, in the order in which it asks for them."""
    text = importlib.resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    by_identity = {kernel.identity: kernel for kernel in known()}
    return [by_identity[json.dumps(identity)] for identity in json.loads(text)[order]]


@contextlib.contextmanager
def compiling(device: torch.device, order: str) -> Iterator[None]:
    """While the block runs, they are compiled, where the device runs them."""
    with contextlib.ExitStack() as block:
        if dispatch.backend("gemm", device, torch.bfloat16) == arch.CUTE_SM90:
            architecture = arch.describe(device).arch
            block.enter_context(
                together.compiling(listed(order), architecture, f"{__name__}:known")
            )
        yield
