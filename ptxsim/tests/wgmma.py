"""WGMMA products in PTX: operands in their shared-memory layouts, and the kernel around them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .harness import entry, launch
from .snippets import FENCE

COMMIT = "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
ELEMENT_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # swizzle mode of a descriptor -> swizzled row
_XOR_BITS = {0: 0, 1: 7, 2: 3, 3: 1}


@dataclass(frozen=True)
class Layout:
    """How an operand of `rows` x k elements lies in shared memory.

    mode: swizzle of the matrix descriptor: 0 none, 1 128 B, 2 64 B, 3 32 B.
    major: "k", or "m" for the transposed layouts.
    leading, stride: byte offsets of the descriptor.
    nbytes: what the tile spans.
    """

    mode: int
    major: str
    leading: int
    stride: int
    nbytes: int

    @staticmethod
    def of(mode: int, major: str, rows: int, element_bytes: int) -> Layout:
        """Offsets with gaps that a wrong decoding would hit."""
        row = _ROW_BYTES[mode]
        if major == "k" and mode == 0:
            leading = 128 * (rows // 8) + 128
            return Layout(mode, major, leading, 128, 2 * leading)
        if major == "k":
            stride = 8 * row + (0 if mode == 1 else 1024)
            return Layout(mode, major, 16, stride, stride * (rows // 8))
        if mode == 0:
            stride = 256 + 128
            return Layout(mode, major, 128, stride, stride * (rows // 8))
        leading = max(1024, 16 * row)
        atoms = -(-rows * element_bytes // row)
        return Layout(mode, major, leading, 8 * row, leading * atoms)

    def descriptor(self, start: int) -> np.uint64:
        fields = start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32
        return np.uint64(fields | self.mode << 62)

    def place(self, image: np.ndarray, start: int, matrix: np.ndarray) -> None:
        """Writes a matrix of encoded elements into a byte image of shared memory."""
        size, row_bytes = matrix.dtype.itemsize, _ROW_BYTES[self.mode]
        r, k = np.indices(matrix.shape)
        if self.major == "k":
            chunk, within = k * size // 16, k * size % 16
            across = self.leading if self.mode == 0 else 16
            at = r % 8 * row_bytes + r // 8 * self.stride + chunk * across + within
        elif self.mode == 0:
            per = 16 // size
            at = r // per * self.stride + k % 8 * 16 + k // 8 * self.leading + r % per * size
        else:
            per = row_bytes // size
            at = r // per * self.leading + r % per * size
            at += k % 8 * row_bytes + k // 8 * self.stride
        at += start
        at ^= (at >> 7 & _XOR_BITS[self.mode]) << 4
        raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, size)
        for byte in range(size):
            image[at + byte] = raw[..., byte]


def encode(values, ty: str) -> np.ndarray:
    """Numbers that the type holds exactly, in its bits."""
    values = np.asarray(values)
    if ty == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    plain = {"f16": np.float16, "tf32": np.float32, "s8": np.int8, "u8": np.uint8}
    if ty in plain:
        return values.astype(plain[ty])
    mantissa, bias = (3, 7) if ty == "e4m3" else (2, 15)
    patterns = {}
    for bits in range(256):
        e, m = bits >> mantissa & (1 << 7 - mantissa) - 1, bits & (1 << mantissa) - 1
        x = (m / 2**mantissa + (e > 0)) * 2.0 ** (max(e, 1) - bias)
        patterns.setdefault(-x if bits >> 7 else x, bits)
    return np.vectorize(lambda x: patterns[float(x)])(values).astype(np.uint8)


def accumulator_index(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of accumulator element [warp, lane, i]."""
    w, lane, i = np.meshgrid(np.arange(4), np.arange(32), np.arange(n // 2), indexing="ij")
    return 16 * w + lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + 2 * (lane % 4) + i % 2


def register_operand(matrix: np.ndarray) -> np.ndarray:
    """The fragments [warp, lane, register, part] of an encoded A in registers."""
    per, k = 4 // matrix.dtype.itemsize, matrix.shape[1]
    w, lane, r, part = np.indices((4, 32, 4, per))
    return matrix[16 * w + lane // 4 + 8 * (r & 1), lane % 4 * per + part + r // 2 * (k // 2)]


def module(
    registers: int,
    image_bytes: int,
    mma: str,
    acc: str = "f32",
    fence: str = FENCE,
    after: str = "",
    wait: str = WAIT,
) -> str:
    """128 threads fill shared memory from argument 0, load accumulators from argument 1, run `mma`
    (with ACC for the accumulators, %d10 and %d11 for the descriptors of arguments 3 and 4, %r20 to
    %r23 for A in registers and %p1 for argument 5), and store the accumulators to argument 2."""
    kind, ty = ("%f", "f32") if acc == "f32" else ("%r", "b32")
    regs = [f"{kind}{100 + i}" for i in range(registers)]
    loads = "\n".join(f"ld.global.{ty} {r}, [%d3+{4 * i}];" for i, r in enumerate(regs))
    stores = "\n".join(f"st.global.{ty} [%d4+{4 * i}], {r};" for i, r in enumerate(regs))
    mma = mma.replace("ACC", "{" + ", ".join(regs) + "}")
    body = f"""mov.u32 %r1, %tid.x; mov.u32 %r2, dyn; mov.u32 %r3, %r1;
CP: setp.ge.u32 %p2, %r3, {image_bytes // 16}; @%p2 bra CD;
mul.wide.u32 %d1, %r3, 16; add.u64 %d1, %d1, %d50; ld.global.v4.u32 {{%r4, %r5, %r6, %r7}}, [%d1];
mad.lo.u32 %r8, %r3, 16, %r2; st.shared.v4.u32 [%r8], {{%r4, %r5, %r6, %r7}};
add.u32 %r3, %r3, 128; bra CP;
CD: {fence} bar.sync 0;
cvt.u64.u32 %d10, %r2; shr.u64 %d10, %d10, 4; and.b64 %d10, %d10, 0x3fff;
add.u64 %d11, %d10, %d54; add.u64 %d10, %d10, %d53; setp.ne.u32 %p1, %r385, 0;
mul.wide.u32 %d2, %r1, {4 * registers}; add.u64 %d3, %d51, %d2; add.u64 %d4, %d52, %d2;
mul.wide.u32 %d5, %r1, 16; add.u64 %d5, %d5, %d50;
ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%d5];
{loads}
wgmma.fence.sync.aligned; {mma} {COMMIT} {after} {wait}
{stores}"""
    dynamic = ".extern .shared .align 1024 .b8 dyn[];"
    return entry(body, ["u64", "u64", "u64", "u64", "u64", "u32"], dynamic)


def product(
    a,
    b,
    c,
    types: tuple[str, str, str] = ("bf16", "bf16", "f32"),
    modes: tuple[int, int] = (1, 1),
    majors: tuple[str, str] = ("k", "k"),
    a_in_registers: bool = False,
    signs: tuple[int, int] = (1, 1),
    accumulate: bool = True,
    **options: int,
) -> np.ndarray:
    """D = signs * A B^T (+ C) by one instruction; A is 64 x k, B is n x k, C and D are 64 x n.

    types: of A, B and D; modes and majors: of A and B, see Layout.
    """
    ty_a, ty_b, ty_d = types
    size, n = ELEMENT_BYTES[ty_a], len(b)
    image, layouts, starts = _image(a, b, types, modes, majors, a_in_registers)
    code_a, transposed = "%d10", [int(major == "m") for major in majors]
    if a_in_registers:
        code_a, transposed = "{%r20, %r21, %r22, %r23}", transposed[1:]
    immediates = [] if ty_d == "s32" else [*signs, *(transposed if size == 2 else [])]
    operands = ", ".join(["ACC", code_a, "%d11", "%p1", *map(str, immediates)])
    mma = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // size}.{ty_d}.{ty_a}.{ty_b} {operands};"
    dtype = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[ty_d]
    row, col = accumulator_index(n)
    acc = np.ascontiguousarray(np.asarray(c)[row, col].astype(dtype)).view(np.uint32)
    out = np.zeros_like(acc)
    descriptors = [layout.descriptor(at) for layout, at in zip(layouts, starts, strict=True)]
    args = [image, acc, out, *descriptors, np.uint32(accumulate)]
    text = module(acc.shape[-1], len(image), mma, ty_d)
    launch(text, args, block=(128, 1, 1), dynamic=len(image), **options)
    found = np.zeros((64, n), dtype)
    found[row, col] = out.view(dtype)
    return found


def _image(a, b, types, modes, majors, a_in_registers):
    """Shared memory with both operands (A's registers come from its first 2048 bytes)."""
    encoded = [encode(x, ty) for x, ty in zip((a, b), types[:2], strict=True)]
    layouts = [
        Layout.of(mode, major, len(x), x.dtype.itemsize)
        for x, mode, major in zip(encoded, modes, majors, strict=True)
    ]
    start_b = 2048 + -(-layouts[0].nbytes // 1024) * 1024
    image = np.full(-(-(start_b + layouts[1].nbytes) // 4096) * 4096, 0x55, np.uint8)
    if a_in_registers:
        image[:2048] = np.ascontiguousarray(register_operand(encoded[0])).view(np.uint8).ravel()
    else:
        layouts[0].place(image, 2048, encoded[0])
    layouts[1].place(image, start_b, encoded[1])
    return image, layouts, (2048, start_b)


SMALL = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 ACC, %d10, %d11, %p1, 1, 1, 0, 0;"
_SMALL_A, _SMALL_B = Layout(0, "k", 2048, 128, 4096), Layout(0, "k", 512, 128, 1024)
ZERO_SMALL_A = """bar.sync 0; mad.lo.u32 %r8, %r1, 16, %r2; mov.u32 %r4, 0;
st.shared.v4.u32 [%r8+1024], {%r4, %r4, %r4, %r4};
st.shared.v4.u32 [%r8+3072], {%r4, %r4, %r4, %r4}; bar.sync 0;
"""


def small_operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (64 x 16), B (8 x 16) and C (64 x 8) of small integers; no element of A B^T is zero."""
    rng = np.random.default_rng(5)
    return rng.integers(1, 5, (64, 16)), rng.integers(1, 5, (8, 16)), rng.integers(-8, 9, (64, 8))


def run_small(
    mma: str = SMALL,
    leading_a: int = _SMALL_A.leading,
    fence: str = FENCE,
    after: str = "",
    wait: str = WAIT,
    **options: int,
) -> tuple[np.ndarray, dict]:
    """Runs one SMALL or several on small_operands; the accumulators (64 x 8) and the report."""
    a, b, c = small_operands()
    image = np.full(8192, 0x55, np.uint8)
    _SMALL_A.place(image, 1024, encode(a, "bf16"))
    _SMALL_B.place(image, 6144, encode(b, "bf16"))
    row, col = accumulator_index(8)
    acc, out = (
        np.ascontiguousarray(c[row, col].astype(np.float32)),
        np.zeros((4, 32, 4), np.float32),
    )
    layout_a = Layout(0, "k", leading_a, 128, 0)
    descriptors = [layout_a.descriptor(1024), _SMALL_B.descriptor(6144)]
    text = module(4, len(image), mma, fence=fence, after=after, wait=wait)
    args = [image, acc, out, *descriptors, np.uint32(1)]
    report = launch(text, args, block=(128, 1, 1), dynamic=len(image), **options)
    found = np.zeros((64, 8), np.float32)
    found[row, col] = out
    return found, report
