"""Experts cut over ranks: the bytes of one rank, for 1, 2, 4 and 8; refusals on all; mutants.

Ranks are threads of this process, with collectives of the tests, or processes over gloo
(expert_parallel_rank.py).
"""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import process_groups
from tests.integrations import threaded_ranks

from .parallel_cases import cases, differing, random_case, whole


@pytest.fixture
def threaded(monkeypatch):
    """Ranks that are threads, each of which computes alone."""
    team = torch.get_num_threads()
    torch.set_num_threads(1)
    with threaded_ranks.collectives(monkeypatch):
        monkeypatch.setattr(process_groups, "group_of", lambda group, name: group)
        yield
    torch.set_num_threads(team)


def wrong(case, degree: int, of=None, twice: bool = False) -> set[str]:
    """The results of a case that differ on some rank."""
    of = of or whole(case, twice=twice)
    found = threaded_ranks.together(
        degree, lambda rank: differing(case, of, rank, rank.rank(), degree, twice)
    )
    return {name for names in found for name in names}


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_every_degree_has_the_bytes_of_one(threaded, degree):
    for case in cases(degree):
        assert not wrong(case, degree), case
