"""SM90 kernels under every timing the simulator knows: modes, one loop over them, poisoned outputs.

    def run():
        c = poisoned((m, n), torch.bfloat16, "nan")
        kernel(a, b, c)
        return c
    found = run_modes(run)["default"]       # every mode gave these bytes

A kernel whose CTAs wait for lower block indices (a turnstile) takes `ordered(MODES)`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

import ptxsim


class Mode(NamedTuple):
    """Options of ptxsim with a name."""

    name: str
    options: dict[str, int | str]


class ModeFailure(AssertionError):
    """A kernel failed in a mode: an error of the simulator, a failed assertion, other bits, a race
    or a missing fence.  Mutants are to raise it; a mistake in the test raises something else."""


LATE = {"async_mode": "late", "wgmma_mode": "late"}  # data that arrives too late
EARLY = {"async_mode": "now", "wgmma_mode": "late", "warp_order": "random"}  # refilled too early
RANDOM = {"async_mode": "random", "wgmma_mode": "random", "warp_order": "random"}
ANY_CTA = RANDOM | {"cta_order": "random"}


def _modes(seeds: Sequence[int]) -> list[Mode]:
    named: dict[str, dict[str, int | str]] = {"default": {}, "late": LATE}
    for seed in seeds:
        named[f"early-{seed}"] = EARLY | {"seed": seed}
        named[f"random-{seed}"] = ANY_CTA | {"seed": seed}
        for ctas in (1, 2, 132):
            named[f"resident-{ctas}-{seed}"] = RANDOM | {"resident_ctas": ctas, "seed": seed}
    named["descending"] = LATE | {"cta_order": "descending"}
    named["descending-2"] = LATE | {"cta_order": "descending", "resident_ctas": 2}
    named["races"] = RANDOM | {"check_races": 2, "seed": seeds[0]}
    for math in ("fma", "hopper"):
        named[f"{math}-late"] = LATE | {"wgmma_math": math}
        named[f"{math}-random"] = ANY_CTA | {"wgmma_math": math, "seed": seeds[0]}
    return [Mode(name, options) for name, options in named.items()]


MODES = _modes((1, 2, 3))
QUICK_MODES = _modes((1,))  # the same classes, one seed each


#: The mode that finds accesses of shared memory that nothing orders, alone.
RACES = [mode for mode in QUICK_MODES if mode.name == "races"]


def ordered(modes: Iterable[Mode]) -> list[Mode]:
    """The modes that CTAs waiting for lower block indices bear (grids of at most 132 CTAs): where
    few are resident at a time, they are dispatched in ascending order."""
    return [m for m in modes if not {"cta_order", "resident_ctas"} <= m.options.keys()]


def run_modes(
    fn: Callable[[], Any], modes: Iterable[Mode] = MODES, *, same_bits: bool = True
) -> dict[str, Any]:
    """Calls fn once per mode and returns its results by mode name.

    fn: launches kernels on outputs of its own, may assert, returns a tensor or a tuple of them.
    same_bits: all modes with the same wgmma_math must return the same bytes; else any result goes.

    Errors: ModeFailure as soon as a mode fails, naming it; RuntimeError if it launched nothing.
    """
    results, first = {}, {}
    for name, options in modes:
        where = f"mode {name} {options}"
        ptxsim.clear_launches()
        try:
            with ptxsim.options(**options):
                results[name] = fn()
        except (ptxsim.PtxsimError, AssertionError) as error:
            raise ModeFailure(f"{where}: {error}") from error
        if not ptxsim.launches():
            raise RuntimeError(f"{where}: nothing was launched on the simulator")
        if found := _warnings():
            raise ModeFailure(f"{where}: {found}")
        if same_bits:
            found = _bytes(results[name])
            leader, expected = first.setdefault(options.get("wgmma_math", "exact"), (name, found))
            if wrong := sum((x != y).sum().item() for x, y in zip(expected, found, strict=True)):
                raise ModeFailure(f"{where}: {wrong} bytes differ from those of mode {leader}")
    if not results:
        raise ValueError("modes: expected at least one, got none")
    return results


def poisoned(shape: Sequence[int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """A CPU tensor in memory of its own, full of NaN ("nan") or of 0x7F bytes ("0x7f")."""
    if kind == "nan":
        return torch.full(tuple(shape), float("nan"), dtype=dtype)
    if kind != "0x7f":
        raise ValueError(f'kind: "nan" or "0x7f", not {kind!r}')
    out = torch.empty(tuple(shape), dtype=dtype)
    out.view(-1).view(torch.uint8).fill_(0x7F)
    return out


def _warnings() -> list:
    """Races and missing fences of the launches so far."""
    reports = [launch["report"] for launch in ptxsim.launches()]
    wrong = [r for r in reports if r["races"] or r["fence_warnings"]["count"]]
    return [(r["entry"], r["warnings"], r["fence_warnings"]["first"]) for r in wrong]


def _bytes(result: Any) -> list[torch.Tensor]:
    """Copies, as the next call may write to the same memory."""
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return [t.detach().clone().contiguous().view(-1).view(torch.uint8) for t in tensors]
