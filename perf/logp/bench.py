"""`python -m perf bench logp`: check every rival, measure its memory, then time them in turns."""

from __future__ import annotations

import torch

from ..core import passes
from ..core.bits import repeats, same_bytes
from ..core.rival import Call, Rival
from .cases import Case, Inputs
from .rivals import RIVALS

#: Tokens whose results are compared with float64, and with those of the tokens alone.
SOME = 16
REPEATS = 5


def oracle(case: Case, t: Inputs) -> torch.Tensor:
    """Reference of the first tokens in float64: log p, or dhidden of the pass with gradients."""
    hidden = t["hidden"][:SOME].detach().double().requires_grad_()
    weight = t["weight"].detach()
    # A float64 head of all rows would be 5 GB.
    logits = torch.cat([hidden @ rows.double().mT for rows in weight.split(16384)], dim=1)
    logp = torch.log_softmax(logits, 1).gather(1, t["target"][:SOME, None])[:, 0]
    if case.product == "fwd":
        return logp.detach()
    return torch.autograd.grad(logp, hidden, t["d0"][:SOME].double())[0]


def alone(t: Inputs) -> Inputs:
    """The first tokens without the others."""
    subset = {name: t[name].detach()[:SOME] for name in ("hidden", "target", "d0")}
    subset["hidden"].requires_grad_()
    return subset | {"weight": t["weight"]}


def check(rival: Rival, call: Call, case: Case, t: Inputs) -> dict:
    """Memory, error against float64, and for what is ordered: the same bytes again and alone."""
    first = call(t)
    call(t)  # the second call: nothing is made once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call(t)
    outputs = sum(out.nbytes for out in results)
    body = {"extra_mib": (torch.cuda.max_memory_allocated() - before - outputs) / 2**20}
    if "fwd" in rival.start:
        exact = oracle(case, t)
        error = (first[0][:SOME].double() - exact).norm() / exact.norm()
        body["check"] = {"relative_error": float(error), "tokens": SOME}
    bits = {}
    if rival.ordered:
        bits["repeat"] = repeats(lambda: call(t), REPEATS)
        alone_results = rival.start[case.product](case)(alone(t))
        bits["rows"] = same_bytes(alone_results[0], first[0][:SOME])
    return body | {"bitwise": bits}


def facts(case: Case, median_us: float, ceilings: dict[str, float]) -> dict:
    """The head's bytes in that time, as a share of a copy's bandwidth."""
    head = 2 * case.vocab * case.width / median_us / 1e3
    return {"of_copy": head / ceilings["copy_gbs"]}


SUITE = passes.Suite("logp", "linear_logp", RIVALS, check, facts, compares=False)
