"""The functions of elements, a call of each kind."""

from __future__ import annotations

import cute_kernels as ck

CALLS = {
    "silu": lambda x: ck.silu(x),
    "gelu": lambda x: ck.gelu(x),
    "gelu, tanh": lambda x: ck.gelu(x, approximate="tanh"),
    "sigmoid": lambda x: ck.sigmoid(x),
    "tanh": lambda x: ck.tanh(x),
    "silu_mul": lambda x: ck.silu_mul(x, x * 0.5),
    "gelu_mul": lambda x: ck.gelu_mul(x, x * 0.5),
}
