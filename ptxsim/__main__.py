"""`python -m ptxsim selftest`: checks an installation, prints versions and speed.
`record`: runs the simulator's own tests and, if they pass, notes on what they passed."""

from __future__ import annotations

import importlib.metadata
import sys
import time

from . import available, compile, report
from .native import built, library


def selftest() -> None:
    """Builds the library, runs an elementwise kernel and a WGMMA GEMM, and compares results.

    Errors: RuntimeError if a result is wrong.
    """
    started = time.perf_counter()
    library()
    seconds = time.perf_counter() - started
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch"):
        print(f"{name:20} {importlib.metadata.version(name)}")
    print(f"{'library':20} {built().library.parent.name} (ready in {seconds:.1f} s)")
    _elementwise()
    _gemm()
    print("ok")


def _elementwise() -> None:
    import torch

    from .tests import samples

    started = time.perf_counter()
    run = compile(samples.scale, *samples.scale_signature())
    compiled = time.perf_counter() - started
    n = 100_003
    a, b = torch.randn(n), torch.full((n,), float("nan"))
    started = time.perf_counter()
    run(a, b, 3.0)
    seconds = time.perf_counter() - started
    if not (b.view(torch.int32) == (a * 3.0).view(torch.int32)).all():
        raise RuntimeError("elementwise: the result differs from torch's")
    rate = n / seconds / 1e6
    print(
        f"elementwise: {n} elements, compile {compiled:.2f} s, run {seconds:.3f} s,"
        f" {rate:.1f} M elements/s"
    )


def _gemm() -> None:
    import cutlass
    import torch

    from .tests.samples_gemm import Gemm, gemm_signature

    started = time.perf_counter()
    run = compile(Gemm(cutlass.BFloat16), *gemm_signature(cutlass.BFloat16))
    compiled = time.perf_counter() - started
    m, n, k = 200, 136, 328
    torch.manual_seed(0)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    c = torch.full((m, n), float("nan"))
    started = time.perf_counter()
    run(a, b, c)
    seconds = time.perf_counter() - started
    exact = a.double() @ b.double().T
    error = ((c - exact).abs().max() / exact.abs().max()).item()
    if not error < 1e-5:
        raise RuntimeError(f"GEMM: the relative error is {error:g}")
    rate = report()["warp_instructions"] / seconds / 1e6
    print(
        f"WGMMA GEMM {m}x{n}x{k}: compile {compiled:.2f} s, run {seconds:.3f} s,"
        f" error {error:.1e}, {rate:.2f} M warp instructions/s"
    )


def main(arguments: list[str]) -> int:
    if arguments not in (["selftest"], ["record"]):
        print("usage: python -m ptxsim selftest | record", file=sys.stderr)
        return 2
    reason = available.why_not()
    if reason:
        print(reason, file=sys.stderr)
        return 1
    if arguments == ["record"]:
        from .tests import proved

        return proved.record()
    selftest()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
