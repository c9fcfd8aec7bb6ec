"""A patch that raises changes nothing: every step fails once, on new and on patched models."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import cute_kernels as ck
from cute_kernels.errors import MissingPackageError
from cute_kernels.integrations import transformers as integration
from cute_kernels.model.patch import api, classes, guards, state
from tests.contract import same_bytes
from tests.model.patch import all_causal_lms, families

#: Step of a patch -> (where it is looked up, its name, the call that fails).
STEPS = {
    "registration": (integration, "register", 1),
    "classes are made": (classes, "patched_class", 3),
    "frequencies are computed": (state, "exact_frequencies", 1),
    "the first module is restored": (state, "restore", 1),
    "a module is restored": (state, "restore", 9),
    "configs are restored": (state, "restore_configs", 1),
    "the first class": (state, "exchange", 1),
    "a class": (state, "exchange", 7),
    "frequencies": (state, "restore_frequencies", 1),
    "a config": (state, "_swap", 1),
    "all configs": (state, "attend", 1),
    "guards": (guards, "mark", 1),
}


def _state(model: nn.Module) -> list:
    """What a patch writes: classes, attributes, hooks, buffers and configs by identity."""
    rows: list = []
    for name, module in model.named_modules():
        values = {k: list(v.items()) if isinstance(v, dict) else v for k, v in vars(module).items()}
        rows.append((name, type(module), {k: repr(v) for k, v in values.items()}))
        rows.append([id(v) for v in vars(module).values()])
        rows += [(n, id(b), b.dtype) for n, b in module.named_buffers(recurse=False)]
    return rows + [(id(c), repr(vars(c))) for c in state.reachable_configs(model)]


@pytest.mark.parametrize("before", ["new", "patched"])
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_each_step(step, before, monkeypatch):
    holder, name, number = STEPS[step]
    model, tokens = families.model("llama", num_hidden_layers=1), families.ids(2)
    if before == "patched":
        ck.patch(model, order="tree", norm=False)
    logits, state = families.logits(model, tokens), _state(model)
    real, calls = getattr(holder, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) >= number:
            raise MemoryError("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(holder, name, failing)
    with pytest.raises(MemoryError, match="injected"):
        ck.patch(model)
    monkeypatch.undo()
    assert _state(model) == state
    assert same_bytes(families.logits(model, tokens), logits)
    assert ck.patch(model, strict=True).complete
    assert not same_bytes(families.logits(model, tokens), logits)


def test_the_observation_fails_in_any_way(monkeypatch):
    model = all_causal_lms.build("granite")
    state = _state(model)
    monkeypatch.setattr(api, "_report", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ck.patch(model)
    assert _state(model) == state


class _NotInstalled:
    """Finder of a machine without transformers."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


@pytest.mark.parametrize("options", [{"strict": True}, {"norm": False}])
def test_a_model_of_torch_without_transformers(options, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_NotInstalled(), *sys.meta_path])
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU())
    report = ck.patch(model, **options)
    assert report.complete is ("norm" not in options) and report.replaced
    x = torch.randn(3, 64)
    assert same_bytes(model[0](x), ck.linear(x, model[0].weight, model[0].bias))
    assert state.kind_of(copy.deepcopy(model)[0]) == "linear"
    ck.unpatch(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("version", ["4.57.6", "5.2.0.dev0", "5.3"])
def test_an_older_transformers_is_refused_by_name(version, monkeypatch):
    model = families.model("llama", num_hidden_layers=1)
    state = _state(model)
    # transformers puts another module there while it makes a model.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    want = f"transformers: expected 5.4 or newer, got {version}"
    for call in (ck.patch, lambda _: integration.register()):
        with pytest.raises(MissingPackageError) as caught:
            call(model)
        assert str(caught.value) == want
    assert _state(model) == state
    plain = nn.Sequential(nn.Linear(64, 64))
    assert ck.patch(plain, strict=True).complete  # no model of transformers is inside
    assert type(copy.deepcopy(plain)[0]).__name__ == "Linear"


def test_a_newer_transformers_is_taken(monkeypatch):
    for version in ("5.4.0", "5.4.0.dev0", "5.24", "6.0rc1"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        assert integration.why_not() is None
