"""A vocabulary cut over ranks against one rank, byte for byte: for threads and for processes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

import cute_kernels as ck
from cute_kernels.schedulers.tiles import leaves
from tests.contract import same_bytes
from tests.logp import cases
from tests.logp.cases import BF16, DTYPES, FP32


class Cut(NamedTuple):
    """A case and the first row of each rank; the last rank ends with the case's rows."""

    case: cases.Case
    starts: tuple[int, ...]
    dirty: float = 0.0

    def span(self, rank: int) -> slice:
        ends = (*self.starts[1:], self.case.rows)
        return slice(self.starts[rank], ends[rank])


def case_of(vocab: int, rows: int, dtype: torch.dtype = BF16, **changed) -> cases.Case:
    base = cases.Case(3, 9, 40, vocab, rows, dtype, "tree", True, 0.0, "tensor", True, 0.3)
    return base._replace(**changed)


def at_leaves(case: cases.Case, counts: list[int], **options) -> Cut:
    """Ranks that begin after so many leaves."""
    length = leaves.length(case.vocab)
    return Cut(case, tuple(length * count for count in counts), **options)


#: What may differ between cases: dtypes, and every option.
VARIED = (
    [{"dtype": dtype} for dtype in DTYPES]
    + [{"bias": False, "softcap": 5.0, "temperature": "number"}]
    + [{"masked": False, "temperature": "one", "tokens": 1, "dtype": FP32}]
    + [{"tokens": 70, "width": 33}]
)


def cuts_of(degree: int) -> list[Cut]:
    """Of whole leaves: even ones, with padding, and uneven ones."""
    step = 8 // degree
    even = list(range(0, 8, step))
    found = [at_leaves(case_of(1024, 1024, **varied), even) for varied in VARIED]
    # A padded last shard, of NaN.
    found += [at_leaves(case_of(1000, 1024, **v), even, dirty=float("nan")) for v in VARIED]
    found += [at_leaves(case_of(1000, 1100), even, dirty=float("nan"))]
    # Blocks of 1024 inside a leaf.
    found += [at_leaves(case_of(16384, 16384, width=16, tokens=5), even)]
    if degree > 1:
        # Uneven: a leaf, and all others; and the other way round.
        uneven = list(range(degree))
        found += [at_leaves(case_of(1000, 1024), uneven)]
        found += [at_leaves(case_of(1024, 1024, dtype=FP32), [0, *range(9 - degree, 8)])]
        # The last shards are padding alone: seven leaves of 112, then rows of NaN.
        case = case_of(784, 784 + 16 * degree)
        starts = (0, *(784 + 16 * rank for rank in range(degree - 1)))
        found += [Cut(case, starts, float("nan"))]
    return found


def forward_cuts_of(degree: int) -> list[Cut]:
    """At multiples of 16, where dhidden is not asked for: also of the order ``chain``."""
    found = []
    for order in ("chain", "tree"):
        for dtype in (BF16, FP32):
            case = case_of(1000, 1030, dtype, order=order)
            starts = [0, *(1008 - 16 * (degree - rank) ** 2 for rank in range(1, degree))]
            found += [Cut(case, tuple(starts), float("nan"))]
            found += [Cut(case, tuple(16 * rank for rank in range(degree)))]
    return found


@functools.cache
def whole_of(cut: Cut, device: str = "cpu") -> tuple[cases.Inputs, cases.Results]:
    """Operands, and the results of one rank."""
    x = cases.to(device, cases.inputs_of(cut.case, cut.dirty))
    return x, cases.run(cut.case, x)


def differing(
    cut: Cut,
    group,
    rank: int,
    *,
    hidden: bool = True,
    main_grad: bool = False,
    verify: bool | str = "all",
    device: str = "cpu",
) -> list[str]:
    """The results of a rank that are not, byte for byte, its parts of one rank's."""
    x, want = whole_of(cut, device)
    own = cut.span(rank)
    weight = x.weight[own].clone().requires_grad_()
    bias = None if x.bias is None else x.bias[own].clone().requires_grad_()
    given = x.hidden.clone().requires_grad_(hidden)
    options = cut.case.options(x.temperature) | {"group": group, "vocab_start": own.start}
    options |= {"vocab_size": cut.case.vocab, "verify": verify}
    state = torch.ones_like(weight, dtype=FP32) if main_grad else None
    logp, entropy = ck.linear_logp(
        given, weight, x.target, bias, return_entropy=True, main_grad=state, **options
    )
    torch.autograd.backward((logp, entropy), x.upstream)
    got = {"logp": logp, "entropy": entropy, "weight": weight.grad}
    expected = want._asdict() | {"weight": want.weight[own]}
    if main_grad:
        whole = torch.ones_like(x.weight, dtype=FP32)
        cases.run(cut.case, x, main_grad=whole)
        got["weight"], expected["weight"] = state, whole[own]
    if bias is not None:
        got["bias"], expected["bias"] = bias.grad, want.bias[own]
    if hidden:
        got["hidden"] = given.grad
    return [name for name, t in got.items() if not same_bytes(t.detach(), expected[name])]
