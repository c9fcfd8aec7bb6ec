"""A DTensor, as of fully_shard or ``ck.patch(mesh=)``, is refused by name in every op."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import cute_kernels as ck
from cute_kernels.errors import ArgumentTypeError
from tests.public_calls import CASES, leaves_of


@pytest.fixture(scope="module")
def mesh():
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_parameter_is_to_be_gathered_with_its_gradients_mean(mesh):
    """``full_tensor()`` alone gives each shard the gradient of its own rank's tokens."""
    from torch.distributed.tensor import DTensor, Shard

    x, w, target = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([0, 1, 2])
    for axes, advice in ((1, r"\[Partial\('avg'\)\]\)"), (2, r"\[Partial\('avg'\)\] \* 2\)")):
        grid = mesh if axes == 1 else dist.init_device_mesh("cpu", (1, 1))
        sharded = DTensor.from_local(w, grid, [Shard(0)] * axes)
        want = rf"^weight: expected .*inside its module's forward.*grad_placements={advice}"
        for call in (ck.linear, lambda x, w: ck.linear_policy_loss(x, w, target)):
            with pytest.raises(ArgumentTypeError, match=want):
                call(x, torch.nn.Parameter(sharded))
            with pytest.raises(ArgumentTypeError, match=r"^weight: expected .*of a DTensor: full_"):
                call(x, sharded)


@pytest.mark.parametrize("every", [False, True], ids=["one", "every"])
@pytest.mark.parametrize("name", CASES)
def test_a_dtensor_is_refused_by_name(name, every, mesh):
    from torch.distributed.tensor import DTensor, Shard

    call, leaves = CASES[name][0], leaves_of(name)
    for position in range(len(leaves)):
        args = [
            DTensor.from_local(leaf.detach(), mesh, [Shard(0)]) if every or i == position else leaf
            for i, leaf in enumerate(leaves)
        ]
        with pytest.raises(ArgumentTypeError, match=r"^[A-Za-z_]+: expected .*, got a DTensor"):
            call(*args)
