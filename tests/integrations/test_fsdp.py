"""FSDP2: two real processes against one, byte for byte (fsdp_rank.py)."""

from __future__ import annotations

import pytest

from cute_kernels.errors import ArgumentTypeError
from cute_kernels.integrations import fsdp as ours
from tests import ranks
from tests.integrations import fsdp_rank, tiny

two = ranks.pool(tiny.RANKS)
#: (which modules are sharded by themselves besides the whole, tied head)
CASES = [("model", False), ("layers and head", False), ("layers", True)]


@pytest.mark.parametrize(("which", "tied"), CASES)
def test_steps_have_the_bytes_of_one_process(two, tmp_path, which, tied):
    """Log-probs, the gradients of all ranks, the weights after each step of AdamW; publication.

    Nothing whole is kept between a forward and its backward, after a step, an evaluation and a
    publication.
    """
    two.run(fsdp_rank.train, which, tied, 2, tmp_path)


@pytest.mark.parametrize("which", ["model", "layers and head"])
def test_parts_are_refused_by_name(two, which):
    for said in two.run(fsdp_rank.refuse_parts, which):
        assert said.startswith("ArgumentTypeError: weight: expected a whole parameter")
    for said in two.run(fsdp_rank.gather_in_the_forward_only, which):
        assert said.startswith("GatherError: a parameter of the head was resharded")


@pytest.mark.nightly
def test_a_killed_rank_ends_the_others(two):
    two.assert_error_not_hang(1, fsdp_rank.kill_one)


@pytest.mark.nightly
@pytest.mark.parametrize(("which", "tied"), [*CASES, ("layers", False)])
def test_twenty_steps(two, which, tied):
    two.run(fsdp_rank.train, which, tied, 20)


def test_a_model_that_is_not_sharded(tmp_path):
    with pytest.raises(ArgumentTypeError, match="model: expected a module that fully_shard"):
        ours.publish_weights(tmp_path, tiny.llama())
