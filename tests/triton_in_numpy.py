"""Triton's interpreter with the same bits on every machine and with every numpy that we pin.

Inside of `interpreting` kernels that were jitted inside of `jitting` run in numpy, in this process:
Triton's own switch, TRITON_INTERPRET, is for all kernels of a process.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter, jit


def jitting() -> contextlib.AbstractContextManager:
    """While it lasts, ``triton.jit`` makes kernels of the interpreter."""
    return mock.patch.dict(os.environ, TRITON_INTERPRET="1")


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """While it lasts, the language of Triton, functions of its own included, runs in numpy."""
    patch_lang = interpreter._patch_lang
    if patch_lang is _patched:
        yield
        return
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        same_bits(patch)
        # Once, and taken back: calls of device functions would patch again, and leave it so.
        scope = patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        patch.setattr(interpreter, "_patch_lang", _patched)
        patch.setattr(
            jit.JITFunction, "__call__", lambda self, *a, **k: _function(self.fn)(*a, **k)
        )
        try:
            yield
        finally:
            scope.restore()


def _patched(fn) -> interpreter._LangPatchScope:
    return interpreter._LangPatchScope()


@functools.cache
def _function(written: Callable) -> interpreter.InterpretedFunction:
    """A function of Triton's own, which was jitted when Triton was imported."""
    return interpreter.InterpretedFunction(written)


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


def same_bits(monkeypatch) -> None:
    """Dots are chains; numpy 2.4 refuses int() of one element, which Triton 3.6 takes of bounds."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)


def casts_that_round(monkeypatch) -> None:
    """Casts to bf16 round to the nearest even, as a GPU's do; the interpreter's truncate."""

    def cast(self, given, to):
        source, target = given.dtype.scalar, to.scalar
        data = np.array(given.data)
        if source == tl.bfloat16 and target == tl.float32:
            out = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16).float().numpy()
        elif source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(data).to(torch.bfloat16)
            out = rounded.view(torch.int16).numpy().view(np.uint16)
        else:
            out = data.astype(interpreter._get_np_dtype(to))
        return interpreter.TensorHandle(out, target)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


def fma_that_rounds_once(monkeypatch) -> None:
    """The interpreter's is a product and a sum."""

    def fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


def power_of_two(monkeypatch, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """2^y is ``function``'s, in fp32; the interpreter's is numpy's."""

    def exp2(self, y):
        out = function(torch.from_numpy(np.array(y.data))).numpy()
        return interpreter.TensorHandle(out, y.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp2", exp2)


def round_as_gpus_do(monkeypatch) -> None:
    """Casts to bf16 round to the nearest even, and an fma rounds once."""
    casts_that_round(monkeypatch)
    fma_that_rounds_once(monkeypatch)
