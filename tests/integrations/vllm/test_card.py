"""The stages of a card: each has a function, or a module or script that is there."""

from __future__ import annotations

import importlib.util

from tests.integrations.vllm import card, gpu_stages
from tests.ranks import ROOT


def test_what_a_stage_runs_is_there():
    stages, functions = card.stages(), gpu_stages.functions()
    assert not (stages.keys() & {*card.ENGINES, *card.TRAINERS, "model"})
    assert functions.keys() == {name for name, stage in stages.items() if not stage.arguments}
    for first, name, *_ in filter(None, (stage.arguments for stage in stages.values())):
        assert importlib.util.find_spec(name) if first == "-m" else (ROOT / first).is_file()
    assert all(15 < stage.limit_s <= 400 for stage in stages.values())
