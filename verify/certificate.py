"""Certificates: what the compiled code of a kernel proves about the order of its operations.

A kernel is compiled for sm_90a, on any host, and its PTX, cubin and SASS are read.

| rule | class | what must hold |
|---|---|---|
| A1 | A, B | no floating-point atomic on memory; in class B none but those that R1 and R2 order |
| A2 | A, B | no clock, timer, SM id or warp id is read |
| R1 | B | on every path an acquire spin stands between a release and the next reduction |
| R2 | B | on every path a full bulk wait, then a gpu-scope release, follow each reduction |
| R3 | A, B | with dependent launch: griddepcontrol.wait comes before all use of global memory |
| R4 | A, B | offsets into global memory are widened to 64 bits before they are multiplied |
| R5 | A, B | no spills, registers and shared memory under a ceiling, the MMA that was meant |
| R6 | A, B | what warpgroups hold after setmaxnreg fits the registers that the CTA starts with |
| R7 | A, B | ptxas has not serialised WGMMA: batches and waits are those of the PTX |
| R8 | A, B | registers of a WGMMA are left alone until a wait retires it; fences stand before it |

Class A is for kernels without ordered reductions (gemm, splitk, linear_logp, mhc), class B for the
dQ, dK and dV of attention.  R1 to R4, R6 and R8 are proved on PTX; SASS is read for R5, against the
PTX for R7, again for A1, A2, R6 and R8, and in class B for the presence of each part of the
turnstile.

A certificate proves the structure of an order, not that there is no race: which address a
semaphore has, which value a spin waits for and which threads a barrier counts are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from cute_kernels.compile.kernel import Expect
from cute_kernels.errors import ArgumentValueError, one_of

from . import ptx, ptx_paths, sass
from .in_flight import in_flight
from .offsets import Offsets, touches_global
from .products import serialised
from .registers import register_pools
from .report import Certificate, Finding
from .sass import at
from .turnstile import Turnstile, event_of


def certify(
    build: Callable[[], Any],
    *,
    name: str,
    constexpr: Mapping[str, Any],
    kind: Literal["A", "B"],
    expect: Expect,
) -> Certificate:
    """Compiles a kernel and reads its certificate.

    Args:
        build: calls ``cute.compile`` exactly once; its result is not used.
        name, constexpr: what the record calls the kernel and its configuration.
        kind: the class of rules, ``"A"`` or ``"B"``.
        expect: ceilings and the matrix instruction.

    Raises:
        CertificateError: nothing, or more than one thing, was compiled; no disassembler.
        Whatever `build` raises.
    """
    _check_kind(kind)
    made = sass.artefacts(build)
    return certificate(made, name=name, constexpr=constexpr, kind=kind, expect=expect)


def certificate(
    made: sass.Artefacts,
    *,
    name: str,
    constexpr: Mapping[str, Any],
    kind: Literal["A", "B"],
    expect: Expect,
) -> Certificate:
    """The certificate of a kernel that is already compiled; see `certify`."""
    _check_kind(kind)
    functions = sass.parse(made.sass)
    usage = sass.usage(made.cubin).values()
    pools, _ = register_pools(ptx.parse(made.ptx), functions, made.cubin)
    return Certificate(
        name=name,
        constexpr=tuple(constexpr.items()),
        arch=ptx.target(made.ptx),
        toolchain=made.toolchain,
        kind=kind,
        opcodes=tuple(sass.histogram(functions).items()),
        registers=max(u.registers for u in usage),
        shared_static=max(u.shared for u in usage),
        shared_dynamic=made.dynamic_shared,
        stack=max(u.stack for u in usage),
        spills=len(sass.local_accesses(functions)),
        sass_sha256=sass.digest(functions),
        findings=(check_a if kind == "A" else check_b)(made, expect),
        register_pool=min(pools, key=lambda pool: pool.size - pool.asked, default=None),
    )


def check_a(made: sass.Artefacts, expect: Expect) -> tuple[Finding, ...]:
    """The findings of class A: A1, A2, R3 to R8."""
    module, code = ptx.parse(made.ptx), sass.parse(made.sass)
    found = (*sass.float_atomics([*module, *code]), *sass.naps(module))
    return (*found, *_common(module, code, made, expect))


def check_b(made: sass.Artefacts, expect: Expect) -> tuple[Finding, ...]:
    """The findings of class B: R1, R2, the A1 that they do not cover, A2, R3 to R8."""
    module, code = ptx.parse(made.ptx), sass.parse(made.sass)
    ordered = {event_of(i) for f in module for i in f.instructions} & {"add", "add_async"}
    found = [] if ordered else [Finding("R1", "module", "no ordered reduction: this is class A")]
    callees = {function.name: function for function in module}
    for function in module:
        found += Turnstile(function, callees).findings()
    found += sass.turnstile_parts(code, "add_async" in ordered)
    return (*found, *_common(module, code, made, expect))


def _common(module: list, code: list, made: sass.Artefacts, expect: Expect) -> Iterator[Finding]:
    for function in module:
        yield from sass.float_swaps(function)
        yield from _dependent_launch(function, expect)
        yield from Offsets(function, expect.max_step).findings()
    yield from sass.clocks([*module, *code])
    yield from sass.resources(code, made, expect)
    yield from register_pools(module, code, made.cubin)[1]
    yield from serialised(module, code)
    yield from in_flight(module, code)


def _check_kind(kind: str) -> None:
    if kind not in ("A", "B"):
        raise ArgumentValueError(one_of("kind", ("A", "B"), kind))


# R3: programmatic dependent launch.


def _dependent_launch(function: ptx.Function, expect: Expect) -> list[Finding]:
    if not function.is_entry or not expect.pdl:
        return []
    found: dict[int, Finding] = {}

    def execute(waited: bool, i: ptx.Instruction) -> bool:
        if i.base != "griddepcontrol" and not waited:
            found.setdefault(i.index, at("R3", function, i, "no griddepcontrol.wait before it"))
        return waited or i.base == "griddepcontrol"

    ptx_paths.walk(
        function,
        ptx_paths.Values(function),
        False,
        lambda i: i.opcode == "griddepcontrol.wait" or touches_global(i),
        execute,
        lambda waited, _: waited,
        lambda waited, *_: waited,
    )
    return list(found.values())
