"""vime's provider and verl's head: the bytes of ``ck.linear_logp``, in their duck types."""

from __future__ import annotations

import functools
import sys
import types
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    LogpProviderUnavailable,
    ShapeError,
)
from cute_kernels.integrations import verl, vime
from cute_kernels.schedulers.tiles import leaves
from tests import ranks
from tests.contract import same_bytes

TOKENS, WIDTH = 37, 96


class Case(NamedTuple):
    """A head: entries of the vocabulary, rows with padding, dtype."""

    real: int
    padded: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False


#: Two ranks begin at leaves of the real size; of the padded one alone (144 and 160 entries).
CASES = (
    Case(1000, 1024),
    Case(1024, 1024, torch.float32, bias=True),
    Case(1100, 1280),
    Case(1100, 1280, torch.float32, bias=True),
)


class Tensors(NamedTuple):
    """Operands of a whole vocabulary."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    temperature: torch.Tensor
    d_logp: torch.Tensor
    d_entropy: torch.Tensor


def tensors_of(case: Case) -> Tensors:
    generator = torch.Generator().manual_seed(case.real)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    weight = (randn(case.padded, WIDTH) * 0.3).to(case.dtype)
    weight[case.real :] = 50.0  # padding that would win, if it counted
    target = torch.randint(0, case.real, (TOKENS,), generator=generator)
    return Tensors(
        hidden=randn(TOKENS, WIDTH).to(case.dtype).requires_grad_(),
        weight=weight.requires_grad_(),
        bias=randn(case.padded).to(case.dtype).requires_grad_() if case.bias else None,
        target=target,
        temperature=torch.rand(TOKENS, generator=generator) + 0.5,
        d_logp=randn(TOKENS),
        d_entropy=randn(TOKENS),
    )


def request_of(case: Case, t: Tensors, rank: int = 0, ranks: int = 1, group=None, **changed):
    """vime's request of one rank, as far as it is read, in objects of no class of vime."""
    rows = case.padded // ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    weight = t.weight.detach()[mine].requires_grad_()
    bias = None if t.bias is None else t.bias.detach()[mine].requires_grad_()
    context = SimpleNamespace(
        hidden=t.hidden.detach().requires_grad_(),
        projection=SimpleNamespace(weight=weight, bias=bias),
        vocab_partition=SimpleNamespace(
            local_start=mine.start, local_size=rows, real_size=case.real, padded_size=case.padded
        ),
    )
    fields = {
        "target_ids": t.target,
        "tensor_parallel_group": group,
        "with_entropy": True,
        "with_entropy_grad": True,
        "log_prob_keep_mask": None,
        "context": context,
        "temperature": t.temperature,
    }
    return SimpleNamespace(**fields | changed)


def results_of(logp, entropy, t: Tensors, hidden, weight, bias) -> dict[str, torch.Tensor | None]:
    """Log p, entropy and the gradients of the operands."""
    ((logp * t.d_logp).sum() + (entropy * t.d_entropy).sum()).backward()
    gradients = {"hidden": hidden.grad, "weight": weight.grad}
    gradients["bias"] = None if bias is None else bias.grad
    return {"logp": logp.detach(), "entropy": entropy.detach()} | gradients


def wanted(case: Case, order: str, size: int | None = None) -> dict[str, torch.Tensor | None]:
    """``ck.linear_logp`` of the whole vocabulary on one rank; size: that leaves are cut by."""
    t = tensors_of(case)
    bias = t.bias
    if size == case.padded != case.real:
        whole = torch.zeros(case.padded, dtype=case.dtype) if bias is None else bias
        bias = whole.masked_fill(torch.arange(case.padded) >= case.real, -torch.inf)
    scored = ck.linear_logp(
        t.hidden, t.weight, t.target, bias, temperature=t.temperature, return_entropy=True,
        order=order, vocab_size=size or case.real,
    )  # fmt: skip
    return results_of(*scored, t, t.hidden, t.weight, t.bias)


def differing(got: dict, want: dict, rank: int = 0, ranks: int = 1) -> list[str]:
    """Names of results that have other bytes than a rank's part of the whole vocabulary's."""
    cut = ((name, want[name]) for name in ("weight", "bias") if want[name] is not None)
    parts = {name: t.chunk(ranks)[rank] for name, t in cut}
    return [n for n, t in got.items() if t is not None and not same_bytes(t, (want | parts)[n])]


def served(case: Case, provider=vime.provider, rank: int = 0, ranks: int = 1, group=None) -> dict:
    t = tensors_of(case)
    request = request_of(case, t, rank, ranks, group)
    result, head = provider(request), request.context.projection
    operands = request.context.hidden, head.weight, head.bias
    return results_of(result.logp[:, 0], result.entropy, t, *operands)


def serve_two_ranks() -> None:
    """vime's provider and verl's function on one of two ranks over gloo."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for case in CASES:
        size = case.padded if case.padded == 1280 else case.real
        got = served(case, rank=rank, ranks=2, group=group)
        wrong = differing(got, wanted(case, "tree", size), rank, 2)
        assert not wrong, (case, wrong)
    t = tensors_of(CASES[1])
    operands = t.weight[rank * 512 : rank * 512 + 512], t.target, t.temperature, "none", group
    got = verl.linear_cross_entropy(t.hidden, *operands)
    options = {"temperature": t.temperature, "order": "tree", "return_entropy": True}
    want = ck.linear_logp(t.hidden, t.weight, t.target, **options)
    assert all(same_bytes(a.detach(), b.detach()) for a, b in zip(got, want, strict=True))


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_has_the_bytes_of_linear_logp(case):
    for provider, order in ((vime.provider, "chain"), (vime.tree_provider, "tree")):
        got = served(case, provider)
        assert not differing(got, wanted(case, order))


def test_two_ranks_over_gloo():
    ranks.run(2, serve_two_ranks)


def test_leaves_of_the_real_size_and_of_the_padded_one():
    """The control of the cases: one begins at leaves of the real size, the other does not."""
    assert 512 % leaves.length(1000) == 0
    assert 640 % leaves.length(1100) and 640 % leaves.length(1280) == 0


# ---- what vime reads ----------------------------------------------------------------------------


def test_the_result_is_what_vime_validates():
    case = CASES[0]
    t = tensors_of(case)
    result = vime.provider(request_of(case, t, with_entropy_grad=False, temperature=None))
    assert result.logp.shape == (TOKENS, 1) and result.logp.requires_grad
    assert result.entropy.shape == (TOKENS,) and not result.entropy.requires_grad
    assert result.contract_id == ck.contract_id("linear_logp", "cpu", case.dtype)
    assert result.backend_id == "cute_kernels.cpu"
    assert result.provenance["real_vocab_size"] == 1000 and result.provenance["order"] == "chain"
    want = ck.linear_logp(t.hidden, t.weight, t.target, vocab_size=1000)
    assert same_bytes(result.logp[:, 0].detach(), want.detach())
    for temperature in (0.7, torch.tensor(0.7)):
        got = vime.provider(request_of(case, t, temperature=temperature)).logp[:, 0]
        want = ck.linear_logp(t.hidden, t.weight, t.target, vocab_size=1000, temperature=0.7)
        assert same_bytes(got.detach(), want.detach())


def vime_boundary(request, provider, mode: str) -> str:
    """Run a provider as vime does, whose documented rule decides what an exception means."""
    try:
        provider(request)
    except Exception as error:
        if not getattr(error, "linear_logp_provider_unavailable", False):
            raise
        if mode == "strict":
            raise RuntimeError(f"unavailable: {error}") from error
        return "native"
    return "provider"


def changing(path: str, change):
    """A function that replaces the part of a request at a path."""

    def of(request) -> None:
        *folders, name = path.split(".")
        owner = functools.reduce(getattr, folders, request)
        setattr(owner, name, change(getattr(owner, name)))

    return of


def cut_in_three(request) -> None:
    """1008 entries over three ranks, off the leaves."""
    request.tensor_parallel_group = SimpleNamespace(size=lambda: 3)
    vars(request.context.vocab_partition).update(padded_size=1008, local_size=336)


PROJECTION = "context.projection.weight"
KEEP = torch.ones(TOKENS, 1024, dtype=torch.bool)
UNSERVED = [
    (changing("log_prob_keep_mask", lambda _: KEEP), "request.log_prob_keep_mask: expected None"),
    (changing("context", lambda _: None), r"request\.context: .*None"),
    (changing("context.hidden", torch.Tensor.double), r"request\.context\.hidden: .*float64"),
    (changing(PROJECTION, torch.Tensor.float), rf"request\.{PROJECTION}: .*float32"),
    (cut_in_three, r"vocab_partition: .*multiple of 128.*3 of 336 rows"),
]


@pytest.mark.parametrize(("change", "words"), UNSERVED)
def test_what_cannot_be_served_is_unavailable(change, words):
    request = request_of(CASES[0], tensors_of(CASES[0]))
    assert vime_boundary(request, vime.provider, "strict") == "provider"
    change(request)
    with pytest.raises(LogpProviderUnavailable, match=words):
        vime.provider(request)
    assert vime_boundary(request, vime.provider, "auto") == "native"
    with pytest.raises(RuntimeError, match=r"unavailable: .*expected"):
        vime_boundary(request, vime.provider, "strict")


def test_a_wrong_request_is_no_fallback():
    request = request_of(CASES[0], tensors_of(CASES[0]))
    request.target_ids = request.target_ids[:-1]
    with pytest.raises(ShapeError, match="target"):
        vime_boundary(request, vime.provider, "auto")


# ---- verl ---------------------------------------------------------------------------------------


def test_verls_form_has_the_bytes_of_linear_logp():
    t = tensors_of(Case(1024, 1024))
    hidden = t.hidden.view(1, TOKENS, -1)
    labels, temperatures = t.target[None], t.temperature[None]
    got = verl.linear_cross_entropy(hidden, t.weight, labels, temperatures, "none")
    want = ck.linear_logp(hidden, t.weight, labels, temperature=temperatures, return_entropy=True)
    assert all(same_bytes(a.detach(), b.detach()) for a, b in zip(got, want, strict=True))
    assert got[0].shape == (1, TOKENS) and got[1].requires_grad
    with pytest.raises(ArgumentValueError, match=r"reduction: .*'mean'"):
        verl.linear_cross_entropy(hidden, t.weight, labels, 1.0, "mean")
    with pytest.raises(ArgumentTypeError, match=r"bias: .*got 1"):
        verl.linear_cross_entropy(hidden, t.weight, labels, bias=1)


def test_install_replaces_verls_function(monkeypatch):
    def theirs(*args):
        raise AssertionError("verl's own kernel was called")

    for name in ("verl", "verl.utils", "verl.utils.kernel", verl.MODULE, verl._USERS[0]):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module, user = sys.modules[verl.MODULE], sys.modules[verl._USERS[0]]
    with pytest.raises(ArgumentTypeError, match=r"verl: expected a version with verl\.utils"):
        verl.install()
    module.linear_cross_entropy = user.linear_cross_entropy = theirs
    verl.install()
    verl.install()
    t = tensors_of(Case(1024, 1024))
    logp, _ = user.linear_cross_entropy(t.hidden, t.weight, t.target, 1.0, "none")
    assert same_bytes(logp.detach(), ck.linear_logp(t.hidden, t.weight, t.target).detach())
    assert module.linear_cross_entropy is verl.linear_cross_entropy
