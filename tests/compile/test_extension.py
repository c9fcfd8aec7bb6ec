"""calls.c: it says of tensors what Python says and gives kernels what tvm_ffi gives; its builds.

Kernels are C functions here, with tvm_ffi's calling convention, on CPU tensors.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import sys

import pytest
import torch

from cute_kernels import settings
from cute_kernels.compile import extension
from cute_kernels.compile.call import bind
from cute_kernels.runtime import plan_cache
from tests.compile import reporting
from tests.compile.toy import needs_linker
from tests.contract import same_bytes

pytestmark = needs_linker

NUMBERS = torch.arange(96.0)


# ---- describe ------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


#: Calls' tensors; no two are of one kind.
KINDS = {
    "matrix": (NUMBERS.view(8, 12),),
    "turned": (NUMBERS.view(8, 12).mT.contiguous().mT,),
    "of another shape": (NUMBERS.view(12, 8),),
    "of another rank": (NUMBERS.view(2, 4, 12),),
    "of other strides where a size is 1": (NUMBERS.view(8, 12)[:1],),
    "one row": (NUMBERS[:12].view(1, 12),),
    "one row in a wider one": (NUMBERS[:24].view(1, 24)[:, :12],),
    "scalar": (NUMBERS[0],),
    "bf16": (NUMBERS.bfloat16().view(8, 12),),
    "fp16": (NUMBERS.half().view(8, 12),),
    "int32": (NUMBERS.int().view(8, 12),),
    "expanded": (NUMBERS[:12].expand(8, 12),),
    "two": (NUMBERS.view(8, 12), NUMBERS),
    "two, the first missing": (None, NUMBERS.view(8, 12)),
    "two, the second missing": (NUMBERS.view(8, 12), None),
    "none": (None,),
    "nothing": (),
}


def freed(offset: int) -> torch.Tensor:
    """A view of freed storage, at an address of its offset."""
    memory = torch.randn(96 + offset)
    view = memory[offset:].view(8, 12)
    memory.untyped_storage().resize_(0)
    return view


#: What has more of a say than its memory's description.
UNKNOWN = {
    "subclass": NUMBERS.as_subclass(Subclass),
    "negated": torch._neg_view(NUMBERS),
    "address": NUMBERS[1:],
    "empty": NUMBERS[:0].view(0, 12),
    "empty, without a storage": torch.empty(0, 12),
    "a ZeroTensor": torch._efficientzerotensor((8, 12)),
    "freed": freed(0),
    "freed, behind its start": freed(64),
    "sparse": NUMBERS.view(8, 12).to_sparse(),
    "sparse rows": NUMBERS.view(8, 12).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([NUMBERS[:3], NUMBERS[:4]]),
    "no tensor": 3.0,
    "class": torch.Tensor,
}


def test_two_kinds_differ_in_c_where_they_do_in_python(calls):
    for one, other in itertools.combinations(KINDS.values(), 2):
        same = plan_cache.describe(*one) == plan_cache.describe(*other)
        assert (calls.describe(*one) == calls.describe(*other)) is same, (one, other)
    assert len({calls.describe(*tensors) for tensors in KINDS.values()}) >= len(KINDS) - 1
    for tensors in KINDS.values():  # whatever the values are
        copies = [
            t if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).fill_(7)
            for t in tensors
        ]
        assert calls.describe(*tensors) == calls.describe(*copies) is not None
    parameter = torch.nn.Parameter(NUMBERS)
    assert calls.describe(parameter) == calls.describe(NUMBERS)
    assert calls.describe(parameter[:12]) == calls.describe(NUMBERS[:12])
    assert calls.describe(*[NUMBERS.view(8, 12)] * 16) is not None
    for too_many in ([NUMBERS.view(8, 12)] * 400, [NUMBERS.view([1] * 16 + [96])], [None] * 400):
        assert calls.describe(*too_many) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_may_have_more_of_a_say_is_not_described(calls, name):
    for tensors in ((UNKNOWN[name],), (NUMBERS, UNKNOWN[name]), (None, UNKNOWN[name], NUMBERS)):
        assert calls.describe(*tensors) is None
        if isinstance(UNKNOWN[name], torch.Tensor):
            assert plan_cache.describe(*tensors) is None


# ---- launch --------------------------------------------------------------------------------------


def reported(report, *args):
    """Arguments as tvm_ffi's own call hands them over."""
    out = reporting.empty(len(args))
    report(out, *args)
    return out


def test_a_kernel_is_given_what_tvm_ffi_would_give_it(calls, report):
    x, turned = torch.randn(2, 3, 4), torch.randn(4, 6).half().mT
    args = (x, turned, None, -7, 2.5, torch.nn.Parameter(x[0]), turned[1:, 1:], NUMBERS[:0])
    out = reporting.empty(len(args))
    calls.launch(report, 0, out, *args)
    assert same_bytes(out, reported(report, *args))
    assert out[:5, 0].tolist() == [reporting.TENSOR] * 2 + [0, reporting.INTEGER, reporting.FLOAT]
    # fp16 on a CPU, and its layout.
    assert out[1, 1:9].tolist() == [turned.data_ptr(), 2, 16, 1, 1, 2, 6, 4]
    assert out[1, 11:13].tolist() == [1, 6] and out[3, 1] == -7


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 4), (4,), (1, 2, 3, 5), (0, 3, 4), (2, 0)])
def test_rows_are_flattened_where_that_is_asked(calls, report, shape):
    x, other = torch.randn(shape), torch.randn(2, 2, 2)
    out = reporting.empty(2)
    calls.launch(report, 0b10, out, x, other)
    flat = x.view(math.prod(shape[:-1]), shape[-1])
    assert same_bytes(out, reported(report, flat, other))


def test_errors_have_their_words(calls, report):
    out = reporting.empty(1)
    before = out.clone()
    with pytest.raises(RuntimeError, match=r"^ValueError: the first argument is no tensor$"):
        calls.launch(report, 0, 3)
    for bad in ("text", True, [1], 1j):
        with pytest.raises(TypeError, match=f"^a kernel takes no {type(bad).__name__}$"):
            calls.launch(report, 0, out, bad)
    with pytest.raises(TypeError, match="at most 24 arguments"):
        calls.launch(report, 0, out, *[None] * 24)
    with pytest.raises(TypeError, match="launch takes"):
        calls.launch(report)
    with pytest.raises(OverflowError):
        calls.launch(report, 0, out, 1 << 63)
    with pytest.raises(AttributeError, match="__chandle__"):
        calls.launch(print, 0, out)
    with pytest.raises((RuntimeError, NotImplementedError, BufferError)):
        calls.launch(report, 0, out, UNKNOWN["sparse"])
    assert same_bytes(out, before)

    # Simulated launches are in Python: what only C refuses would be seen on a card alone.
    recorded, x = [], torch.randn(2, 3)
    launch = bind(torch.device("cpu"), lambda *args: recorded.append(args))
    for bad in ("text", True, [1], 1j, (1, 2)):
        with pytest.raises(TypeError, match=f"^a kernel takes no {type(bad).__name__}$"):
            launch(x, bad)
    with pytest.raises(TypeError, match="at most 24 arguments"):
        launch(*[None] * 25)
    launch(x, None, 3, 2.0)
    bind(torch.device("cpu"), lambda *args: recorded.append(args), tuples=True)(x, (1, 2))
    assert len(recorded) == 2


def test_a_prepared_call_hands_over_the_same_in_c_and_in_python(calls, report, monkeypatch):
    x, outs = torch.randn(2, 3, 4), []
    # A CPU has no index; the current device is asked for a GPU's alone.
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: None)
    for module, devices in ((calls, 1), (calls, 2), (None, 2)):
        monkeypatch.setattr(extension, "calls", lambda module=module: module)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda devices=devices: devices)
        outs.append(reporting.empty(3))
        bind(x.device, report, flatten=(1, 2))(outs[-1], x, None, 1.5)
    assert same_bytes(*outs[:2]) and same_bytes(*outs[1:]) and outs[0][0, 6:9].tolist() == [2, 6, 4]


def test_no_reference_is_lost_or_kept(calls, report):
    """One that is kept keeps a step's activations, one that is lost ends the process."""
    x, out = torch.randn(2, 3, 4), reporting.empty(3)
    watched = (x, out, report, torch.Tensor, torch.nn.Parameter, UNKNOWN["negated"])
    before = [sys.getrefcount(thing) for thing in watched]
    for _ in range(1000):
        calls.launch(report, 0b10, out, x, None, 2.5)
        calls.describe(x, None, UNKNOWN["negated"])
        with pytest.raises(RuntimeError):
            calls.launch(report, 0, 3)
    assert [sys.getrefcount(thing) for thing in watched] == before


# ---- as on a GPU ---------------------------------------------------------------------------------

READ = "return torch_table->dltensor_from_py_object_no_sync(tensor, into);"
#: `read_tensor` as of a tensor on the device whose index is in the environment.
READ_OF_DEVICE = """
  int failed = torch_table->dltensor_from_py_object_no_sync(tensor, into);
  into->device.device_id = (int)strtol(getenv("DEVICE_OF_TEST"), NULL, 10);
  return failed;
"""
ON_DEVICE = {
    READ: READ_OF_DEVICE,
    "#include <stdint.h>": "#include <stdint.h>\n#include <stdlib.h>",
}
#: CPU tensors have a stream.
WITH_STREAM = {"tensor->device.device_type != kDLCPU": "1"}


def built(folder, *changes: dict[str, str]):
    """Build calls.c with parts replaced, each of which is there once."""
    text = extension.SOURCE.read_text()
    for part, by in (item for change in changes for item in change.items()):
        assert text.count(part) == 1
        text = text.replace(part, by)
    source = folder / "calls.c"
    source.write_text(text)
    return extension.imported(extension.build(source, folder))


@pytest.mark.parametrize("forgotten", [False, True])
def test_calls_on_two_devices_are_two(tmp_path, monkeypatch, forgotten):
    """The kernel of one device is launched on its stream alone; the mutant has one key for both."""
    mutant = {" | (uint32_t)t.device.device_id": ""} if forgotten else {}
    module, keys = built(tmp_path, ON_DEVICE, mutant), []
    for device in ("0", "1", "0"):
        monkeypatch.setenv("DEVICE_OF_TEST", device)
        keys.append(module.describe(NUMBERS.view(8, 12), None))
    assert keys[0] == keys[2] is not None
    assert (keys[0] == keys[1]) is forgotten


@pytest.mark.parametrize("inverted", [False, True])
def test_a_launch_restores_the_stream_of_others(tmp_path, report, inverted):
    """tvm_ffi's stream of this thread is another library's; the mutant leaves torch's there."""
    from tvm_ffi import core

    mutant = {"before != stream": "before == stream"} if inverted else {}
    module, out, of_others = built(tmp_path, WITH_STREAM, mutant), reporting.empty(1), 0x50
    core._env_set_current_stream(1, 0, of_others)
    try:
        module.launch(report, 0, out, 7)
        assert core._env_get_current_stream(1, 0) == (0 if inverted else of_others)
        with pytest.raises(RuntimeError, match="the first argument is no tensor"):
            core._env_set_current_stream(1, 0, of_others)
            module.launch(report, 0, 3, out)
        assert core._env_get_current_stream(1, 0) == (0 if inverted else of_others)
    finally:
        core._env_set_current_stream(1, 0, 0)
    assert out[0, 1] == 7


# ---- when it is built ----------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is found yet, and the cache folder is empty."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(extension, "_find", extension._find.__wrapped__)
    return tmp_path / "cache"


def test_it_is_built_once_kept_and_built_again_if_damaged(fresh, monkeypatch, caplog):
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    assert extension.calls().describe(NUMBERS) and not fresh.exists()
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "1")
    assert extension.missing() is None and extension.calls().describe(NUMBERS)
    (library,) = fresh.glob("calls-*.so")
    with monkeypatch.context() as patch:
        patch.setattr(extension, "build", lambda *_: 1 / 0)
        assert extension.calls().describe(NUMBERS)
    whole = library.read_bytes()
    # Another file in its place: this process has the first one open.
    library.unlink()
    library.write_bytes(whole[:-1])
    library.chmod(0o600)
    with caplog.at_level(logging.WARNING):
        assert extension.missing() is None
    assert "compiling again" in caplog.text and library.read_bytes()[:4] == whole[:4]
    assert len(library.read_bytes()) == len(whole)


def bad_source(patch, tmp_path):
    (tmp_path / "calls.c").write_text("#error of another age\n")
    patch.setattr(extension, "SOURCE", tmp_path / "calls.c")


def open_folder(patch, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)


WITHOUT = {
    "CUTE_KERNELS_EXTENSION=0": lambda patch, _: patch.setenv("CUTE_KERNELS_EXTENSION", "0"),
    r"no C compiler \(cc, gcc, clang\)": lambda patch, _: patch.setattr(
        extension.shutil, "which", lambda name: None
    ),
    "could not compile calls.c: .*of another age": bad_source,
    "apache-tvm-ffi is not installed": lambda patch, _: patch.setattr(
        extension.toolchain, "ffi_version", lambda: "none"
    ),
    "torch has no table of DLPack functions": lambda patch, _: patch.delattr(
        torch.Tensor, "__dlpack_c_exchange_api__"
    ),
    "lets group or others write": open_folder,
}


@pytest.mark.parametrize("reason", WITHOUT)
def test_where_it_cannot_be_had_python_does_it_and_the_reason_is_known(
    fresh, monkeypatch, tmp_path, reason
):
    WITHOUT[reason](monkeypatch, tmp_path)
    assert extension.calls() is None
    assert re.search(reason, extension.missing())
    monkeypatch.setattr(plan_cache, "on_gpu", lambda t: True)
    plans = plan_cache.PlanCache()
    assert plans.find((), NUMBERS) is None
    plans.add((), (NUMBERS,), len)
    assert plans.find((), NUMBERS) is len and "find" not in vars(plans)
    assert settings.get("EXTENSION") in ("0", "1")
