"""`python -m perf bench model`: audit the patched model, then time steps of everybody in turns."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import torch

from ..core import record, timing, watch, work
from . import host, llama, shapes
from .llama import Size


def audited(size: Size, device: str) -> dict:
    """Audit of the patched model, and of the model as it is."""
    import cute_kernels as ck

    generator = torch.Generator(device).manual_seed(3)
    inputs = [
        torch.randint(0, size.vocab, (length,), generator=generator, device=device)
        for length in shapes.AUDITED
    ]
    body = {"product": "audit", "shape": shapes.AUDIT, "dtype": "bf16", "status": "ok"}
    for patched in (True, False):
        model = llama.built(size, device, patched).eval()
        if patched:
            for weight in model.parameters():
                weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        report = ck.audit(model, inputs, gradients=patched)
        name = "ours" if patched else "torch"
        body[name] = {
            "ok": report.ok,
            "rows": report.rows,
            "differing": report.differing,
            "culprits": sorted({f"{f.kind} {f.transform}" for f in report.findings}),
            "skipped": dict(report.skipped),
        }
    return body | {"system": "ours", "bitwise": {"audit": body["ours"]["ok"]}}


def timed(product: str, starts: dict[str, object], label: str, rounds: int) -> Iterator[dict]:
    """The systems' steps in turns: a record for each."""
    calls, failed = {}, {}
    for name, start in starts.items():
        try:
            calls[name] = start()
            for _ in range(3):
                calls[name]()
        except Exception as error:
            calls.pop(name, None)
            failed[name] = watch.words(error)
    turned = {name: lambda number, call=call: call() for name, call in calls.items()}
    if product in shapes.AWAITED:
        times = timing.awaited(turned, rounds=rounds)
    else:
        times = timing.interleave(turned, rounds=rounds, chunk=2)
    fields = work.spreads({name: stats.samples for name, stats in times.items()})
    common = {"product": product, "shape": label, "dtype": "bf16"}
    same_bits = {name: _same(call) for name, call in calls.items() if hasattr(call, "in_one_pass")}
    for name, stats in times.items():
        # A step whose host is slower than its device is part of the truth: backlog says so.  A
        # step that is awaited has none.
        more = {"backlog": stats.backlog}
        if name in same_bits:
            more["bitwise"] = {"as in one pass": same_bits[name]}
        yield common | {"system": name, "status": "ok"} | fields[name] | more
    for name, why in failed.items():
        yield common | {"system": name, "status": "failed", "why": why}


def _same(call) -> bool:
    """Whether a decoding step's logits are those of one pass, byte for byte."""
    step, one_pass = (t.contiguous().view(torch.uint8) for t in (call(), call.in_one_pass()))
    return torch.equal(step, one_pass)


def model(
    size: Size,
    systems: list[str],
    *,
    output: Path,
    rounds: int,
    parts: list[str],
    commit: str | None = None,
    device: str = "cuda",
) -> Iterator[dict]:
    """Yields each record as it is written."""
    common = record.environment(commit) | {"kind": "bench", "kernel": "model"}
    common |= {"model": size.label}

    def recorded(body: dict) -> dict:
        body |= common | {"clocks": record.clocks()}
        record.append(output, body)
        gc.collect()
        torch.cuda.empty_cache()
        return body

    if "host" in parts:
        for body in host.measured(device):
            yield recorded(body)
    if "audit" in parts:
        yield recorded(audited(size, device))
    for part, sizes in shapes.TIMED.items():
        start = getattr(llama, part)
        for batch, length in sizes if part in parts else ():
            starts = {
                name: functools.partial(start, size, device, name, batch, length)
                for name in systems
            }
            for body in timed(part, starts, f"{batch}x{length}", rounds):
                yield recorded(body)


def line(body: dict) -> str:
    """One record for the terminal."""
    head = f"{body['product']:<9} {body['shape']:<16} {body['system']:<15}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:100]}"
    if body["product"] == "audit":
        words = [f"{name}: {body[name]['differing']} rows differ" for name in ("ours", "torch")]
        return f"{head} {'; '.join(words)}"
    if "host_us" in body:
        return f"{head} {body['host_us']:10.1f} us of the host"
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in body["ratio"].items())
    awaited = body["product"] in shapes.AWAITED
    late = "" if body["backlog"] or awaited else "  (the device waited for the host)"
    return f"{head} {body['median_us']:10.0f} us  [{ratios}]{late}"
