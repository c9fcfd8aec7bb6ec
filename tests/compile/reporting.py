"""A kernel's function that writes down what it was called with: tvm_ffi's convention, on a CPU."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from cute_kernels.compile import extension

#: Words for an argument, and what a tensor's are.
WORDS = 16
INTEGER, FLOAT, TENSOR = 1, 3, 7

_SOURCE = """
#include <dlpack/dlpack.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

static const DLTensor *tensor_of(const TVMFFIAny *argument) {
  if (argument->type_index == kTVMFFIDLTensorPtr) return argument->v_ptr;
  if (argument->type_index != kTVMFFITensor) return NULL;
  return (const DLTensor *)((const char *)argument->v_obj + sizeof(TVMFFIObject));
}

int __tvm_ffi_report(void *self, const TVMFFIAny *arguments, int32_t count, TVMFFIAny *result) {
  const DLTensor *out = count ? tensor_of(arguments) : NULL;
  if (out == NULL) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "the first argument is no tensor");
    return -1;
  }
  for (int i = 1; i < count; i++) {
    int64_t *words = (int64_t *)((char *)out->data + out->byte_offset) + (i - 1) * 16;
    const DLTensor *t = tensor_of(arguments + i);
    words[0] = t ? 7 : arguments[i].type_index;
    if (t == NULL) {
      words[1] = arguments[i].v_int64;
      continue;
    }
    words[1] = (int64_t)t->data + t->byte_offset;
    words[2] = t->dtype.code, words[3] = t->dtype.bits, words[4] = t->dtype.lanes;
    words[5] = t->device.device_type, words[6] = t->ndim;
    for (int d = 0; d < t->ndim; d++) words[7 + d] = t->shape[d], words[11 + d] = t->strides[d];
  }
  result->type_index = kTVMFFINone;
  return 0;
}
"""


@functools.cache
def calls_in_c():
    """calls.c, built once a process."""
    folder = Path(tempfile.mkdtemp())
    return extension.imported(extension.build(extension.SOURCE, folder))


@functools.cache
def reporter() -> Callable:
    """``report(out, *args)`` writes an argument a row of out, int64 [len(args), WORDS].

    Its kind and its value; of a tensor its address, dtype, device, rank <= 4, sizes and strides.
    """
    import tvm_ffi

    folder = Path(tempfile.mkdtemp())
    source = folder / "report.c"
    source.write_text(_SOURCE)
    return tvm_ffi.load_module(str(extension.build(source, folder))).get_function("report")


def empty(count: int) -> torch.Tensor:
    """An ``out`` for so many arguments."""
    return torch.full((count, WORDS), -(1 << 40), dtype=torch.int64)
