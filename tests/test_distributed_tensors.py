"""A DTensor, as of fully_shard or ``ck.patch(mesh=)``, is refused by name in every op."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from cute_kernels.errors import ArgumentTypeError
from tests.public_calls import CASES, leaves_of


@pytest.fixture(scope="module")
def mesh():
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


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
