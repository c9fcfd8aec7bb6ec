"""Triton's interpreter with the same bits on every machine and with every numpy that we pin."""

from __future__ import annotations

import numpy as np
import pytest
from triton.runtime import interpreter


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in fp32, each element one ascending chain of multiply-adds that round once.

    `np.matmul` is the machine's BLAS: on some CPUs a row's bits depend on its place in the tile.
    """
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for column, row in zip(a.T.astype(np.float64), b.astype(np.float64), strict=True):
            out = (column[:, None] * row + out).astype(np.float32)
    return out


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return interpreter.TensorHandle(product(a.data, b.data) + d.data, d.dtype.scalar)


@pytest.fixture(autouse=True)
def same_on_every_machine(monkeypatch):
    """Dots are chains; numpy 2.4 refuses int() of one element, which Triton 3.6 takes of bounds."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
