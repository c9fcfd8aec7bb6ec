"""torch's default dtype and default device are the user's: no bit of ours depends on them."""

from __future__ import annotations

import contextlib

import pytest
import torch

import cute_kernels as ck
from cute_kernels.schedulers import BlockMask
from tests.contract import same_bytes
from tests.sparse_attn import cases


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: name -> (what the user sets, a number of its own: caches must be cold under each setting)
SETTINGS = {
    "bfloat16": (lambda: default_dtype(torch.bfloat16), 1),
    "float16": (lambda: default_dtype(torch.float16), 2),
    "float64": (lambda: default_dtype(torch.float64), 3),
    "meta": (lambda: torch.device("meta"), 4),
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu")


def products(dtype: torch.dtype, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(x, weight, bias, dy, main_grad) of a size of its own."""
    n, k = 40 + 16 * number, 100 + 16 * number
    out = drawn(70, k), drawn(n, k, seed=1), drawn(n, seed=2), drawn(70, n, seed=3)
    return [*(t.to(dtype) for t in out), drawn(n, k, seed=4)]


def linear(x, weight, bias, dy, state) -> list[torch.Tensor]:
    """The outputs and the gradients of linear, of linear with main_grad, and of matmul."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = ck.linear(*leaves)
    y.backward(dy)
    state = state.clone()
    ck.linear(x, leaves[1], main_grad=state).backward(dy)
    out = ck.matmul(x, weight.mT)
    return [y.detach(), *(t.grad for t in leaves), state, out]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_linear_under_other_defaults(setting, dtype):
    enter, number = SETTINGS[setting]
    inputs = products(dtype, number)
    identity = ck.contract_id("linear", "cpu", dtype)
    with enter():
        got = linear(*inputs)
        assert ck.contract_id("linear", "cpu", dtype) == identity
    assert all(map(same_bytes, got, linear(*inputs)))


def masks(length: int) -> dict[str, BlockMask | None]:
    """A rule, a band, bits and documents, made under the setting as well."""
    token = torch.arange(length, device="cpu")
    dense = (token[:, None] * 7 + token * 3) % 5 < 3
    return {
        "none": None,
        "window": BlockMask.sliding_window(length, length, left=70, right=3, device="cpu"),
        "bits": BlockMask.from_dense(dense | (token[:, None] == token)),
        "documents": BlockMask.document((token // 60)[None]),
    }


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_attention_under_other_defaults(setting):
    enter, number = SETTINGS[setting]
    length = 190 + number
    x = cases.inputs(1, 2, 1, length, length, 64)

    def run(mask, causal: bool) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in x.leaves()]
        out, lse = ck.block_sparse_attention(
            *leaves, mask, causal=causal, softcap=5.0 * causal, schedule="spt", return_lse=True
        )
        torch.autograd.backward([out, lse], [x.dout, x.dlse])
        return [out.detach(), lse.detach(), *(t.grad for t in leaves)]

    with enter():
        made = masks(length)
        got = {(name, c): run(mask, c) for name, mask in made.items() for c in (False, True)}
    plain = masks(length)
    for (name, causal), results in got.items():
        assert all(map(same_bytes, results, run(plain[name], causal))), (name, causal)
        assert made[name] is None or made[name].hash() == plain[name].hash()


def paged() -> list[torch.Tensor]:
    """paged_attention behind write_kv_cache: two sequences, a chunk and a step."""
    q, key, value = (drawn(6, heads, 64, seed=heads).bfloat16() for heads in (4, 1, 1))
    caches = [torch.zeros(4, 16, 1, 64, dtype=torch.bfloat16, device="cpu") for _ in range(2)]
    ck.write_kv_cache(key, value, *caches, SLOTS)
    return [*ck.paged_attention(q, *caches, *LISTS, return_lse=True), *caches]


SLOTS = torch.tensor([0, 1, 2, 3, 4, 32])
LISTS = [torch.tensor(t, dtype=torch.int32) for t in ([[0, 1], [2, 3]], [5, 1], [0, 5, 6])]


def test_paged_attention_under_a_default_device():
    """Other public calls: tests/test_public_calls.py."""
    with torch.device("meta"):
        elsewhere = paged()
    assert {t.device.type for t in elsewhere} == {"cpu"}
    assert all(map(same_bytes, elsewhere, paged()))
