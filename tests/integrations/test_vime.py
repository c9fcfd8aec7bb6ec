"""vime's provider and verl's head: the bytes of ``ck.linear_logp``, in their duck types."""

from __future__ import annotations

import functools
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
from cute_kernels.schedulers.tiles import leaves
from tests import ranks
from tests.contract import same_bytes
from tests.integrations import vime_cases
from tests.integrations.vime_cases import CASES, TOKENS, Case, request_of, tensors_of

# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank_has_the_bytes_of_linear_logp(case):
    for provider, order in ((vime.provider, "chain"), (vime.tree_provider, "tree")):
        got = vime_cases.served(case, provider)
        assert not vime_cases.differing(got, vime_cases.wanted(case, order))


def test_two_ranks_over_gloo():
    ranks.run(2, vime_cases.serve_two_ranks)


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


def changing(path: str, change):
    """A function that replaces the part of a request at a path."""

    def of(request) -> None:
        *folders, name = path.split(".")
        owner = functools.reduce(getattr, folders, request)
        setattr(owner, name, change(getattr(owner, name)))

    return of


def cut_in_three(request) -> None:
    """1008 entries over three ranks, off the leaves."""
    request.tensor_parallel_group = Ranks(3)
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
