"""How many files a reader of ``ck.patch`` opens, and how often he comes back to one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cute_kernels as ck
from tests.model.patch import families

ROOT = str(Path(ck.__file__).parent)


@pytest.mark.nightly
def test_the_walk_of_a_patch_is_short():
    """Each function counts at its first call, from the file of its caller.

    A stay is a run of functions in one file; a return is a stay in a file that had one before.
    """
    stack: list[tuple[str, str]] = []
    seen: set[tuple[str, str]] = set()
    stays: list[str] = []

    def profile(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or code.co_name == "<module>":
            return
        if event == "call":
            function = code.co_filename, code.co_qualname
            if function not in seen:
                for file, _ in (*stack[-1:], function):
                    if [file] != stays[-1:]:
                        stays.append(file)
            seen.add(function)
            stack.append(function)
        elif event == "return" and stack:
            stack.pop()

    net = families.model("llama")
    ck.unpatch(net)  # imports the modules
    sys.setprofile(profile)
    try:
        ck.patch(net)
    finally:
        sys.setprofile(None)
    files = len(set(stays))
    assert 10 < len(stays) < 50 and len(stays) - files < 20, (len(stays), files)
