"""compile.call: a kernel runs with the device of its inputs current, whichever was; its results."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from cute_kernels.compile import call as call_module
from cute_kernels.compile import extension
from cute_kernels.compile.call import allocator, bind, call


@pytest.mark.parametrize(
    ("device", "current", "entered"),
    [("cuda:1", 0, [torch.device("cuda:1")]), ("cuda:1", 1, []), ("cuda:0", 0, []), ("cpu", 3, [])],
)
def test_the_inputs_device_is_current(monkeypatch, device, current, entered):
    log = []

    @contextlib.contextmanager
    def make_current(which):
        log.append(which)
        yield
        log.append("left")

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    call(torch.device(device), lambda *args: log.append(args), 1, "x")
    assert log == [*entered, (1, "x"), *["left" for _ in entered]]

    # Where C launches, likewise; CPU tensors are a simulator's, which has no such kernels.
    log.clear()
    kernel = types.SimpleNamespace(__chandle__=None)
    calls = types.SimpleNamespace(launch=lambda kernel, rows, *args: log.append((rows, *args)))
    monkeypatch.setattr(extension, "calls", lambda: calls)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    if device != "cpu":
        bind(torch.device(device), kernel, flatten=(0, 2))(1, "x")
        assert log == [*entered, (0b101, 1, "x"), *["left" for _ in entered]]


CPU = torch.device("cpu")


def facts(t: torch.Tensor) -> list:
    return [
        *(type(t), t.shape, t.stride(), t.dtype, t.device, t.layout, t.storage_offset()),
        *(t.is_contiguous(), t.is_contiguous(memory_format=torch.channels_last), t.is_leaf),
        *(t.untyped_storage().nbytes(), t.untyped_storage().resizable(), t.is_pinned()),
        *(t.requires_grad, t.grad_fn, t.is_inference(), t.data_ptr() % 64),
        torch._C._dispatch_keys(t),
    ]


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4, 5), (2, 1, 1, 3), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_results_are_as_torch_allocates_them(monkeypatch, shape, dtype, lacking):
    if lacking:
        monkeypatch.setitem(call_module._EMPTY, "cpu", None)
    assert call_module._EMPTY["cuda"] is not None
    make = allocator(torch.Size(shape), dtype, CPU)
    like = torch.empty(1, dtype=dtype)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            out = make()
            assert facts(out) == facts(like.new_empty(shape))
            assert out._is_view() is False and (out.is_inference() or out._version == 0)
    one, other = make(), make()
    assert one.data_ptr() != other.data_ptr()
    one.fill_(2).requires_grad_().sum().backward()
    assert one.grad.shape == one.shape
    turned = torch.empty(2, 5, 3, 8, dtype=dtype).transpose(1, 2)
    made = allocator(turned.shape, dtype, CPU, turned.stride())()
    assert facts(made) == facts(torch.empty_like(turned)) and not made._is_view()


def test_results_are_on_the_inputs_device(monkeypatch):
    """torch.compile's allocate on the current one."""
    log = []
    monkeypatch.setitem(call_module._EMPTY, "cuda", lambda *args: log.append(args))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    empty = torch.empty

    def by_torch(size, *, dtype, device):
        if device == "meta":
            return empty(size, dtype=dtype, device=device)
        return log.append((size, dtype, device))

    monkeypatch.setattr(torch, "empty", by_torch)
    for index in (0, 1):
        allocator((3, 4), torch.float16, torch.device("cuda", index))()
    assert log == [((3, 4), torch.float16, torch.device("cuda:0")), ((3, 4), (4, 1), torch.float16)]
