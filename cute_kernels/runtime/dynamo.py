"""The mark of functions that torch.compile must not make graphs of: `untraced`.

Dynamo looks at every Python frame below one that it could not trace (a graph break in a loop or in
a ``try``, say), a backend's launcher among them, and compiles what it finds there anew: with other
bits than the launcher's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_frames = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)


def untraced(function: Callable) -> Callable:
    """``function``, marked so that it and all that it calls run as they are written.

    Costs nothing at a call.  ``torch.compiler.disable`` would, and imports all of dynamo (2 s).
    """
    _frames.set_code_exec_strategy(function.__code__, _SKIP)
    return function
