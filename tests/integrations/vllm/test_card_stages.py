"""The stages of a card: each is named in the docstring, and its module or script is there."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.integrations.vllm import card, card_stages
from tests.ranks import ROOT

#: Names in the docstring's table.
NAMES = [
    name
    for line in card_stages.__doc__.splitlines()
    if line.startswith("    ")
    for name in re.split(r"\s{2,}", line.strip())[0].split(", ")
]


def test_every_stage_is_in_the_docstring():
    known = {*card_stages._modules(), *card_stages._commands(ROOT, ROOT)}
    assert known == set(NAMES)
    assert not known & {*card.ENGINES, "model", "trainer"}
    assert card_stages.find("ours_graph", ROOT, ROOT) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_a_stage_runs_is_there(name):
    stage = card_stages.find(name, ROOT, ROOT)
    if stage.arguments[0] == "-m":
        assert importlib.util.find_spec(stage.arguments[1]) is not None
    else:
        assert (ROOT / stage.arguments[0]).is_file()
    assert 15 < stage.limit_s <= 400
    assert all(isinstance(part, str) for part in (*stage.arguments, *stage.environment.values()))
