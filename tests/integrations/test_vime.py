"""vime's provider and verl's head: the bytes of ``ck.linear_logp``, in their duck types."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest
import torch

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    LogpProviderUnavailable,
    ShapeError,
)
from cute_kernels.integrations import verl, vime
from cute_kernels.logp import shards
from cute_kernels.schedulers.tiles import leaves
from tests.contract import same_bytes
from tests.integrations.vime_cases import (
    CASES,
    TOKENS,
    Case,
    request_of,
    results_of,
    tensors_of,
    wanted,
)
from tests.ranks import reports

UNMASKED = [case for case in CASES if not case.keep]


def served(case: Case, provider=vime.provider, **changed) -> dict:
    t = tensors_of(case)
    request = request_of(case, t, **changed)
    return results_of(provider(request), request, t)


def differing(got: dict, want: dict) -> list[str]:
    return [n for n, v in got.items() if v is not None and not same_bytes(v, want[n])]


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", UNMASKED, ids=str)
def test_one_rank_has_the_bytes_of_linear_logp(case):
    assert not differing(served(case), wanted(case, "chain"))
    assert not differing(served(case, vime.tree_provider), wanted(case, "tree"))


@pytest.mark.parametrize("case", UNMASKED, ids=str)
def test_a_mask_that_keeps_all_has_the_bytes_of_none(case):
    """Log p, and every gradient with the entropy's part in it."""
    keep = torch.ones(TOKENS, case.padded, dtype=torch.bool)
    t = tensors_of(case)
    request = request_of(case, t, log_prob_keep_mask=keep, with_entropy=False)
    result = vime.provider(request)
    (result.logp[:, 0] * t.d_logp).sum().backward()
    plain = request_of(case, t, with_entropy=False)
    want = vime.provider(plain)
    (want.logp[:, 0] * t.d_logp).sum().backward()
    assert same_bytes(result.logp, want.logp) and result.entropy is None
    assert same_bytes(request.context.hidden.grad, plain.context.hidden.grad)
    assert same_bytes(request.context.projection.weight.grad, plain.context.projection.weight.grad)


def reference(t, keep: torch.Tensor, real: int) -> torch.Tensor:
    """Log p over the kept entries in fp64, whose gradient autograd makes."""
    logits = t.hidden.double() @ t.weight.double().mT
    logits = (logits / t.temperature[:, None].double())[:, :real]
    kept = logits.masked_fill(~keep[:, :real], -torch.inf)
    return kept.log_softmax(-1)[torch.arange(TOKENS), t.target]


def test_a_keep_mask_normalises_over_what_is_kept():
    case = Case(1000, 1024, torch.float32, keep=True)
    t = tensors_of(case)
    t.keep[3, t.target[3]] = False  # a target that is left out itself
    request = request_of(case, t, with_entropy=False)
    result = vime.provider(request)
    (result.logp[:, 0] * t.d_logp).sum().backward()
    want = reference(t, t.keep, case.real)
    (want * t.d_logp).sum().backward()
    assert result.logp[3, 0] == want[3] == -torch.inf
    for got, exact in (
        (result.logp[:, 0].detach(), want.detach()),
        (request.context.hidden.grad, t.hidden.grad),
        (request.context.projection.weight.grad, t.weight.grad),
    ):
        bound = 2e-6 * exact[exact.isfinite()].abs().max()
        assert ((got - exact)[exact.isfinite()].abs() <= bound).all()
    kept = served(case)
    assert not differing({"entropy": kept["entropy"]}, wanted(case, "chain"))


def test_a_row_under_a_mask_is_its_own(monkeypatch):
    """Alone and among others, and the mutant that normalises over the batch's union."""
    case = CASES[2]
    whole = served(case, with_entropy_grad=False)
    t = tensors_of(case)
    for row in (0, 5, TOKENS - 1):
        one = slice(row, row + 1)
        request = request_of(case, t, target_ids=t.target[one], temperature=t.temperature[one])
        request.log_prob_keep_mask = t.keep[one]
        request.context.hidden = t.hidden.detach()[one].requires_grad_()
        result = vime.provider(request)
        (result.logp[:, 0] * t.d_logp[one]).sum().backward()
        assert same_bytes(result.logp[:, 0].detach(), whole["logp"][one])
        assert same_bytes(request.context.hidden.grad, whole["hidden"][one])
    true = shards._kept_states
    monkeypatch.setattr(
        shards,
        "_kept_states",
        lambda h, head, rows, keep: true(h, head, rows, keep.any(0).expand_as(keep)),
    )
    assert "logp" in differing(served(case, with_entropy_grad=False), whole)


def test_two_ranks_over_gloo(tmp_path):
    for report in reports("tests.integrations.vime_rank", 2, tmp_path):
        assert report["differing"] == {str(case): [] for case in CASES}
        assert report["all kept"] == []
        t = tensors_of(CASES[1])
        want = ck.linear_logp(
            t.hidden, t.weight, t.target, temperature=t.temperature, order="tree",
            return_entropy=True,
        )  # fmt: skip
        assert report["verl"] == [x.tolist() for x in want]


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
    """What vime does with a provider's exception, by its documented rule."""
    try:
        provider(request)
    except Exception as error:
        if not getattr(error, "linear_logp_provider_unavailable", False):
            raise
        if mode == "strict":
            raise RuntimeError(f"unavailable: {error}") from error
        return "native"
    return "provider"


class Ranks:
    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size


UNSERVED = {
    "no context": (lambda r: setattr(r, "context", None), r"request\.context: .*None"),
    "dtype": (
        lambda r: setattr(r.context, "hidden", r.context.hidden.double()),
        r"request\.context\.hidden: .*float64",
    ),
    "two dtypes": (
        lambda r: setattr(r.context.projection, "weight", r.context.projection.weight.float()),
        r"request\.context\.projection\.weight: .*float32",
    ),
    "shards off the leaves": (
        lambda r: setattr(r, "tensor_parallel_group", Ranks(3)),
        r"vocab_partition: .*multiple of 128.*3 of 1024 rows",
    ),
}


@pytest.mark.parametrize(("change", "words"), UNSERVED.values(), ids=UNSERVED)
def test_what_cannot_be_served_is_unavailable(change, words):
    request = request_of(CASES[0], tensors_of(CASES[0]))
    assert vime_boundary(request, vime.provider, "strict") == "provider"
    if words.startswith("vocab"):
        request.context.vocab_partition.padded_size = 1008
        request.context.vocab_partition.local_size = 336
        words = words.replace("1024", "336")
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
    request = request_of(CASES[2], tensors_of(CASES[2]))
    request.log_prob_keep_mask = request.log_prob_keep_mask[:, :-1]
    with pytest.raises(ShapeError, match=r"keep: expected shape \[37, 1024\]"):
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

    def stub(name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for name in ("verl", "verl.utils", "verl.utils.kernel"):
        stub(name).__path__ = []
    module, user = stub(verl.MODULE), stub(verl._USERS[0])
    with pytest.raises(ArgumentTypeError, match=r"verl: expected a version with verl\.utils"):
        verl.install()
    module.linear_cross_entropy = user.linear_cross_entropy = theirs
    verl.install()
    verl.install()
    model = SimpleNamespace(forward=lambda *args: user.linear_cross_entropy(*args))
    t = tensors_of(Case(1024, 1024))
    logp, _ = model.forward(t.hidden, t.weight, t.target, 1.0, "none")
    assert same_bytes(logp.detach(), ck.linear_logp(t.hidden, t.weight, t.target).detach())
    assert module.linear_cross_entropy is verl.linear_cross_entropy
