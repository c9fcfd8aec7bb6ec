"""Every torch op of the systems under `torch.library.opcheck`.

Its arguments are those of calls of the public functions, forward and backward: by day those of
tests/public_calls.py, at night those of tests/option_table too, with every option.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.library import opcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import cute_kernels as ck
from cute_kernels.mhc import site_op  # noqa: F401  (defines the ops)
from cute_kernels.sparse_attn import api as sparse_attn
from tests import old_memory_cases as old_memory
from tests.contract import ROOT
from tests.main_grad_calls import CALLS as OF_MAIN_GRADS
from tests.main_grad_calls import written
from tests.option_table import TABLE
from tests.public_calls import CASES, both_passes, leaves_of

BF16 = torch.bfloat16


def copied(t: torch.Tensor) -> torch.Tensor:
    """Copy with the strides and ``requires_grad`` of a tensor."""
    out = t.detach().clone() if 0 in t.stride() else torch.empty_like(t).copy_(t.detach())
    return out.requires_grad_(t.requires_grad)


class Recorder(TorchDispatchMode):
    """Arguments of our ops, as they are before the op writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple]] = defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cute_kernels":
            kept = pytree.tree_map_only(torch.Tensor, copied, args)
            self.calls[func._opname].append(kept)
        return func(*args, **(kwargs or {}))


OPS = torch.ops.cute_kernels
RANGES = sparse_attn.kv_ranges(None, torch.arange(6)[None] > 1, 0, 0, (1, 6, 6))
X, INT32 = torch.randn(6, 32), torch.int32
OFFSETS, IDS = torch.tensor([0, 2, 6], dtype=INT32), torch.tensor([1, 3, 0, 2, 1, 1], dtype=INT32)
ROWS = [torch.randn(1, 6, heads, 64).bfloat16().requires_grad_() for heads in (2, 1, 1)]
#: Calls of ops that no public function has, and of ids of int32.
DIRECT = {
    "in steps": lambda: OPS.gated(X.clone().requires_grad_(), X, "silu", True).sum().backward(),
    "norm in steps": lambda: OPS.norm_in_steps(
        X.bfloat16(), X.bfloat16(), X[0], None, None, None, "rms", 1e-5, 0.5
    ),
    "leaves": lambda: OPS.add_leaves(OPS.leaf_sums(X, X, 16), X[:, 0], BF16),
    "leaves of experts": lambda: OPS.grouped_leaf_sums(X, X.view(2, 3, 32), OFFSETS, 16),
    "weights of slots": lambda: OPS.moe_slot_weights(X.abs(), IDS[:, None], True, BF16),
    "ranges": lambda: sparse_attn.sequence_attention(*ROWS, RANGES).sum().backward(),
    "cut ranges": lambda: sparse_attn.cut_kv_ranges(
        sparse_attn.kv_ranges(None, None, 0, 0, (1, 6, 6)), OFFSETS
    ),
    "seen columns": lambda: sparse_attn.seen_columns(torch.ones(1, 1, 6, 6).tril().bool()),
    "targets": lambda: ck.linear_logp(X, X, IDS),
    "ids": lambda: ck.embedding(IDS, X),
}


#: Cases of threads, and of a function of the user's, which an op finds in its context.
NOT_RECORDED = ("shards", "unverified_shards", "function")


def column_major(name: str) -> list[torch.Tensor]:
    leaves = [t.detach() for t in leaves_of(name)]
    leaves = [t.mT.contiguous().mT if t.dim() > 1 else t for t in leaves]
    return both_passes(name, [t.requires_grad_() for t in leaves])


def sources(every: bool) -> Iterator[Callable[[], object]]:
    """Calls of public functions: ``every`` one, or some of each op."""
    yield from (lambda name=name: both_passes(name, leaves_of(name)) for name in CASES)
    yield from (functools.partial(written, name) for name in OF_MAIN_GRADS)
    tables = [cases for name, cases in TABLE.items() if every or name not in CASES]
    if every:
        yield from (functools.partial(column_major, name) for name in CASES)
        tables += old_memory.CASES.values()
    for cases in (*tables, DIRECT):
        yield from (run for label, run in cases.items() if label not in NOT_RECORDED)


def kinds(args: tuple) -> set[tuple]:
    """What kind each argument is of: a call with a new one is checked."""
    found = set()
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            kind = (value.dtype, value.dim(), value.is_contiguous(), value.numel() == 0)
            kind += (value.requires_grad,)
        elif isinstance(value, list):
            kind = tuple(value)
        else:
            kind = value if isinstance(value, bool | str) else type(value)
        found.add((position, kind))
    return found


@functools.cache
def recorded(every: bool) -> dict[str, list[tuple]]:
    """Op -> arguments of calls, those with most arguments of new kinds first."""
    recorder = Recorder()
    for run in sources(every):
        with recorder:
            run()
    chosen = defaultdict(list)
    for op, every in recorder.calls.items():
        seen: set[tuple] = set()
        while new := max((kinds(args) - seen for args in every), key=len):
            chosen[op].append(next(args for args in every if kinds(args) - seen == new))
            seen |= new
    return chosen


def frozen(target: torch._ops.OpOverload, args: tuple) -> tuple:
    """Arguments as opcheck may differentiate them.

    Not of an op that has no second gradient, nor beside a main_grad: autograd.grad, which opcheck
    uses, leaves it alone, and a graph does not.
    """
    names = [argument.name for argument in target._schema.arguments]
    mains = [value for name, value in zip(names, args, strict=True) if "main" in name]
    writes = target._schema.is_mutable
    if writes or any(t is not None for t in mains) or target._opname.endswith(LAST):
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
    return args


#: Ends of the names of ops that are not differentiated again.
LAST = ("_backward", "_gradients")
SYSTEMS = ("gemm", "linear_attn", "logp", "moe", "norm", "rowwise", "sparse_attn")
#: Ops whose schema is in the sources of these systems, and those whose schema is made.
NAMES = sorted(
    {name for name in dir(OPS) if name.startswith("mhc_") or "_attention" in name}
    | {"write_kv_cache"}
    | {
        name
        for system in SYSTEMS
        for path in (ROOT / "cute_kernels" / system).glob("*.py")
        for name in re.findall(r'"(\w+)\(Tensor', path.read_text())
    }
)


def unread(target, args: tuple) -> bool:
    """Whether a result is memory that nothing fills or reads: the link of mhc's recomputation."""
    names = [argument.name for argument in target._schema.arguments]
    return "linked" in names and args[names.index("linked")]


def check(target, calls: list[tuple]) -> None:
    for args in calls:
        assert set(opcheck(target, frozen(target, args)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("op", NAMES)
def test_opcheck(op):
    target = getattr(OPS, op).default
    assert torch.Tag.pt2_compliant_tag in target.tags
    calls = [args for args in recorded(every=False)[op] if not unread(target, args)]
    assert calls, "no call in tests/public_calls.py or tests/option_table runs it"
    check(target, calls[:1])


@pytest.mark.nightly
@pytest.mark.parametrize("op", NAMES)
def test_opcheck_of_all_kinds(op):
    target = getattr(OPS, op).default
    check(target, [args for args in recorded(every=True)[op] if not unread(target, args)])
