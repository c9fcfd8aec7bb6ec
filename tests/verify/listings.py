"""What a disassembler and a compiler would write: PTX and SASS as text, a cubin with one kernel."""

import struct

from verify import ptx


def module(*lines: str) -> list[ptx.Function]:
    """PTX of a kernel k of these lines, with registers of each kind."""
    body = "\n".join(lines)
    return ptx.parse(f"""
.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p)
{{
.reg .b32 %r<33>;
.reg .f32 %f<9>;
.reg .b64 %rd<4>;
.reg .pred %p<4>;
{body}
ret;
}}""")


def function(body: str, bounds: str = ".reqntid 128, 1, 1", name: str = "f") -> ptx.Function:
    """PTX kernel whose registers hold its arguments, its thread and its CTA."""
    return ptx.parse(f"""
.version 9.0
.target sm_90a
.visible .entry {name}(.param .u64 p, .param .u32 n)
{bounds}
{{
  .reg .pred %p<30>;
  .reg .b32 %r<60>;
  .reg .b64 %rd<30>;
  ld.param.u64 %rd1, [p];
  ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %ctaid.x;
{body}
  ret;
}}""")[-1]


def listing(*instructions: str, name: str = "f", start: int = 0, label: int = 0) -> str:
    lines = [f"//------ .text.{name} ------", f".text.{name}:", f".L_x_{label}:"]
    for n, text in enumerate([*instructions, "EXIT"]):
        lines.append(f"        /*{start + 16 * n:04x}*/                   {text} ;")
    return "\n".join([*lines, f"        /*{start + 512:04x}*/                   NOP;", ""])


def elf(registers: int, stack: int, shared: int) -> bytes:
    """A cubin with one kernel k and nothing but what `usage` reads."""
    info = b"".join(
        struct.pack("<BBHII", 4, attribute, 8, 1, value)
        for attribute, value in ((0x2F, registers), (0x11, stack))
    )
    info = struct.pack("<BBH", 3, 0x1B, 255) + info
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0, 0, 0, 0, 0)
    parts = [("", b""), (".strtab", b"\0k\0"), (".symtab", symbols), (".nv.info", info)]
    parts += [(".text.k", bytes(16)), (".nv.shared.k", b"")]
    names = b"".join(name.encode() + b"\0" for name, _ in parts) + b".shstrtab\0"
    parts.append((".shstrtab", names))
    data, heads = b"", b""
    for name, content in parts:
        kind, size = (8, shared) if name == ".nv.shared.k" else (1, len(content))
        index = names.index(name.encode() + b"\0")
        heads += struct.pack("<IIQQQQIIQQ", index, kind, 0, 0, 64 + len(data), size, 0, 0, 1, 0)
        data += content
    head = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 64 + len(data)) + bytes(10)
    head += struct.pack("<HHH", 64, len(parts), len(parts) - 1)
    return head + data + heads
