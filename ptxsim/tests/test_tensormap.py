"""The tensor-map decoder, against what the DSL's host code writes and what ptxas edits."""

import ctypes
import random
import re
import subprocess

import pytest

import ptxsim
from ptxsim import skips

from .harness import find_tool

torch, cutlass, tvm_ffi, samples_tma = map(
    skips.import_module, ("torch", "cutlass", "tvm_ffi", "ptxsim.tests.samples_tma")
)

pytestmark = pytest.mark.sim


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_alive = []


def imagined(address, code, bits, shape, strides):
    """A CUDA tensor at an address that nobody dereferences."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    n = len(shape)
    c_shape, c_strides = (ctypes.c_int64 * n)(*shape), (ctypes.c_int64 * n)(*strides)
    where = [ctypes.addressof(x) for x in (c_shape, c_strides)]
    managed = _DLManagedTensor(address, 2, 0, n, code, bits, 1, *where, 0, None, None)
    _alive.append((c_shape, c_strides, managed))
    return tvm_ffi.from_dlpack(new(ctypes.addressof(managed), b"dltensor", None))


def compile_descriptor(dtype, *kernel_arguments):
    kernel = samples_tma.DescriptorKernel(*kernel_arguments)
    rank = len(kernel.box)
    return ptxsim.compile(kernel, *samples_tma.descriptor_signature(dtype, rank))


def descriptor(run, tensor):
    """The tensor map among the parameters of a launch, in hex."""
    ptxsim.clear_launches()
    with ptxsim.capture_params():
        run(tensor)
    (found,) = [p for p in ptxsim.launches()[-1]["params"] if len(p) == 256]
    return found


# element type, DLPack code, bits, internal type, kind the decoder must name
TYPES = {
    "u8": (cutlass.Uint8, 1, 8, None, 0),
    "s8": (cutlass.Int8, 0, 8, None, 0),
    "i16": (cutlass.Int16, 0, 16, None, 0),
    "i32": (cutlass.Int32, 0, 32, None, 0),
    "u64": (cutlass.Uint64, 1, 64, None, 0),
    "f16": (cutlass.Float16, 2, 16, None, 2),
    "bf16": (cutlass.BFloat16, 4, 16, None, 3),
    "f32": (cutlass.Float32, 2, 32, None, 4),
    "tf32": (cutlass.Float32, 2, 32, cutlass.TFloat32, 5),
    "f64": (cutlass.Float64, 2, 64, None, 6),
}
SWIZZLES = {0: None, 1: (1, 4, 3), 2: (2, 4, 3), 3: (3, 4, 3)}
CASES = [("bf16", rank, (rank * 3 + 2) % 4, "load") for rank in (1, 2, 3, 4, 5)]
CASES += [(name, 2, 0, "load") for name in TYPES if name != "bf16"]
CASES += [("bf16", 3, swizzle, "store") for swizzle in SWIZZLES]
CASES += [("f32", 3, 3, "reduce")]


def random_tensor(rng, rank, unit):
    """A shape, strides in elements (the first contiguous) and a 16-byte aligned address."""
    shape = [rng.choice([rng.randint(1, 300), rng.randint(1, 2**31 - 1)]) for _ in range(rank)]
    strides = [1]
    for _ in range(rank - 1):
        most = rng.choice([2**10, 2**28, 2**36 - 1])
        strides.append(rng.randint(1, most) * 16 // unit)
    return shape, strides, rng.randrange(1, 2**43) * 16


@pytest.mark.parametrize("name, rank, swizzle, op", CASES)
def test_layout(name, rank, swizzle, op):
    """What the host code writes for random shapes and strides, field by field."""
    dtype, code, bits, internal, kind = TYPES[name]
    rng = random.Random(f"{name} {rank} {swizzle} {op}")
    unit = bits // 8
    inner = (16 << swizzle if swizzle else rng.choice([16, 32, 64])) // unit
    # modes of extent one would be merged with their neighbours
    box = (inner, *(rng.randint(2, 5) for _ in range(rank - 1)))
    run = compile_descriptor(dtype, box, SWIZZLES[swizzle], op, internal)
    for _ in range(12):
        shape, strides, address = random_tensor(rng, rank, unit)
        found = descriptor(run, imagined(address, code, bits, shape, strides))
        fields = ptxsim.describe_tensormap(found)
        expected = {
            "global_address": address,
            "rank": rank,
            "element_bytes": unit,
            "element_kind": kind,
            "dims": shape,
            "strides": [s * unit for s in strides],
            "box": list(box),
            "element_strides": [1] * rank,
            "interleave": 0,
            "swizzle": swizzle,
            "oob_fill": 0,
        }
        assert {field: fields[field] for field in expected} == expected


@pytest.fixture(scope="module")
def good():
    """A tensor map that the decoder takes."""
    run = compile_descriptor(cutlass.BFloat16, (64, 8), (3, 4, 3))
    return bytes.fromhex(descriptor(run, imagined(0x7F0000001000, 4, 16, (512, 512), (1, 512))))


def flipped(data, word, bit):
    data = bytearray(data)
    data[word * 4 + bit // 8] ^= 1 << (bit % 8)
    return data


UNKNOWN = [(2, bit) for bit in (0, 1, 2, 3, 11, 12, 16, 19, 20, 22, 23, 31)]
UNKNOWN += [(7, 16), (7, 31), (13, 15), (13, 23), (15, 0)]


@pytest.mark.parametrize("word, bit", UNKNOWN)
def test_unknown_fields_are_refused(good, word, bit):
    with pytest.raises(ptxsim.PtxsimError, match="tensor map"):
        ptxsim.describe_tensormap(flipped(good, word, bit))


def test_known_fields(good):
    plain = ptxsim.describe_tensormap(good)
    assert ptxsim.describe_tensormap(good.hex()) == plain
    for bit in (17, 18, 21):  # no effect on results
        assert ptxsim.describe_tensormap(flipped(good, 2, bit)) == plain
    assert ptxsim.describe_tensormap(flipped(good, 2, 15))["oob_fill"] == 1
    assert ptxsim.describe_tensormap(flipped(good, 13, 3))["element_strides"] == [1, 2]
    for word in range(16, 32):  # not part of the descriptor
        assert ptxsim.describe_tensormap(flipped(good, word, 5)) == plain


def test_what_is_not_a_tensor_map():
    with pytest.raises(ptxsim.PtxsimError):
        ptxsim.describe_tensormap(bytes(128))
    with pytest.raises(ValueError, match="128"):
        ptxsim.describe_tensormap(bytes(64))


# field, operand of tensormap.replace -> byte offset of the word, mask of the edited bits
EDITS = [
    ("rank", "x", 0x08, 0x70),
    ("swizzle_mode", "3", 0x08, 0x6000),
    ("fill_mode", "1", 0x08, None),
    ("element_stride", "0, x", 0x34, 0x7),
    ("element_stride", "4, x", 0x34, 0x7000),
    ("box_dim", "4, x", 0x38, 0xFF000000),
    ("global_dim", "2, x", 0x28, None),
]


@pytest.mark.parametrize("field, operand, offset, mask", EDITS)
def test_fields_against_ptxas(field, operand, offset, mask, tmp_path):
    """The word and bits that ptxas edits for tensormap.replace are the ones the decoder reads."""
    ptxas, nvdisasm = find_tool("ptxas"), find_tool("nvdisasm")
    if not ptxas or not nvdisasm:
        pytest.skip("ptxas and nvdisasm are found neither in PATH nor in triton")
    ptx, cubin = tmp_path / "t.ptx", tmp_path / "t.cubin"
    ptx.write_text(f""".version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 v) {{
.reg .b64 a; .reg .b32 x; ld.param.u64 a, [p]; ld.param.u32 x, [v];
tensormap.replace.tile.{field}.global.b1024.b32 [a], {operand};
ret; }}
""")
    command = [ptxas, "-arch=sm_90a", str(ptx), "-o", str(cubin)]
    subprocess.run(command, check=True, capture_output=True)
    command = [nvdisasm, "-c", str(cubin)]
    sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"+{offset:#x}]" in sass, sass
    assert mask is None or re.search(rf"\b{mask:#x}\b", sass), sass
