"""Groups of ranks: which one an argument means, what its ranks tell each other, who waits for whom.

Collectives here only move bytes; none of them adds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DeviceError,
    RankError,
    UnsupportedTransformError,
    expected,
    one_of,
)
from . import checking

# torch 2.13 has a new name for it, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

#: Values of ``verify``: nothing is compared; sizes and small tensors; large tensors as well.
VERIFY = (False, True, "all")


def group_of(value: object, name: str) -> dist.ProcessGroup:
    """The process group of an argument: a group, or one dimension of a device mesh."""
    if not dist.is_available() or not dist.is_initialized():
        want = "one of ranks: call torch.distributed.init_process_group first"
        raise ArgumentValueError(expected(name, want, type(value).__name__))
    group = _of_mesh(value, name) if isinstance(value, DeviceMesh) else value
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        want = f"a group that this rank ({dist.get_rank()}) is in"
        raise ArgumentValueError(expected(name, want, "one that it is not in"))
    if not isinstance(group, dist.ProcessGroup):
        want = "a DeviceMesh or a ProcessGroup"
        raise ArgumentTypeError(expected(name, want, type(value).__name__))
    return group


def _of_mesh(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        want = "1 dimension (of a larger mesh take one by name: mesh['tp'])"
        raise ArgumentValueError(expected(name, want, f"{mesh.ndim}: {mesh.mesh_dim_names}"))
    ranks = mesh.mesh.tolist()
    if mesh.get_coordinate() is None:
        want = f"a mesh that this rank ({dist.get_rank()}) is in"
        raise ArgumentValueError(expected(name, want, f"ranks {ranks}"))
    if ranks != sorted(ranks):
        # Its group numbers them ascending, so that shards would be added in another order.
        raise ArgumentValueError(expected(name, "ranks in ascending order", ranks))
    return mesh.get_group()


def devices(group: dist.ProcessGroup) -> list[str]:
    """The types of device that a group has a backend for: of ``"cpu:gloo,cuda:nccl"``, both."""
    return [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]


def check_exchangeable(name: str, t: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Check that ``t`` has memory, and ``group`` can exchange tensors of its device."""
    if checking.in_memory(t) is None:
        raise ArgumentTypeError(expected(name, "a tensor with memory", type(t).__name__))
    if group.size() > 1 and t.device.type not in (able := devices(group)):
        want = f"a device that ranks can exchange from ({', '.join(able)})"
        raise DeviceError(expected(name, want, t.device))


def refuse_graphs(function: str) -> None:
    """Refuse ``function`` in a graph of torch.compile and under transforms: ranks meet in it."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise UnsupportedTransformError(
            f"{function}: with a group, a graph of torch.compile and transforms of torch.func are "
            "not supported; compile around it: torch.compiler.disable(function)"
        )


def all_gather(t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[ranks, *t.shape]: of every rank, in the order of ranks; all have the shape of ``t``."""
    if group.size() == 1:
        return t.contiguous().view(1, *t.shape)
    # Flat: gloo takes no output of one dimension more than the input.
    out = t.new_empty(group.size() * t.numel())
    _all_gather(out, t.contiguous().view(-1), group=group)
    return out.view(group.size(), *t.shape)


#: Groups that `connect` has seen.
_connected: weakref.WeakSet = weakref.WeakSet()


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let all ranks of a group meet, before its first `start_messages`; every rank calls it.

    NCCL connects the ranks in their first call, which all of them must make.
    """
    if device.type != "cpu" and group not in _connected:
        all_gather(torch.zeros(1, dtype=torch.float32, device=device), group)
        _connected.add(group)


def start_messages(
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """Start messages between ranks, and return a function that waits until they have arrived.

    Each is (a contiguous tensor, the other's rank in the group); a rank sends to another in the
    order in which that one receives.  On a GPU the current stream waits, not the host.
    """
    ops = [dist.P2POp(dist.isend, t, group=group, group_peer=rank) for t, rank in sends]
    ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=rank) for t, rank in receives]
    return _finish(dist.batch_isend_irecv(ops) if ops else [], ops)


def start_gather(
    out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Start to gather every rank's ``mine`` in ``out``, by rank; the result waits for it.

    Both are flat and contiguous.  On a GPU the current stream waits, not the host.
    """
    return _finish([_all_gather(out, mine, group=group, async_op=True)], [out, mine])


def start_all_to_all(
    out: torch.Tensor,
    mine: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """Start one collective in which each rank sends a part to every rank; the result waits for it.

    Args:
        out, mine: Flat and contiguous: the parts of all ranks by rank, and those for all ranks.
        received, sent: Elements of the parts in ``out`` and in ``mine``.
    """
    options = {"group": group, "async_op": True}
    return _finish([dist.all_to_all_single(out, mine, received, sent, **options)], [out, mine])


def _finish(works: Sequence[dist.Work], holds: list[object]) -> Callable[[], None]:
    """Function that waits for the works, and holds their tensors until then."""

    def finish() -> None:
        for work in works:
            work.wait()
        holds.clear()

    return finish


def agree(
    numbers: Sequence[int], refusal: Exception | None, group: dist.ProcessGroup, name: str
) -> list[list[int]]:
    """Gather each rank's description of its call; raises on every rank if one refuses its own.

    Args:
        numbers: As many on every rank, also on one that refuses.
        refusal: This rank's error, or None.
        group, name: The group, and the argument that it came as.
    """
    # Over CPU memory where the group can: the GPU is not waited for.
    device = "cpu" if "cpu" in (device_types := devices(group)) else device_types[0]
    local = torch.tensor([refusal is not None, *numbers], dtype=torch.int64, device=device)
    refused, *columns = zip(*all_gather(local, group).tolist(), strict=True)
    if refusal is not None:
        raise refusal
    if any(refused):
        ranks = ", ".join(str(rank) for rank, no in enumerate(refused) if no)
        want = f"ones that every rank of {name} takes"
        raise RankError(expected("arguments", want, f"an error on rank {ranks} of it"))
    return [list(row) for row in zip(*columns, strict=True)]


def alike(name: str, values: Sequence[object], group: str) -> None:
    """Check that all ranks described the same call."""
    if len(set(values)) > 1:
        shown = ", ".join(map(str, values))
        raise RankError(expected(name, f"the same on every rank of {group}", shown))


def alike_values(name: str, digests: Sequence[int], group: str) -> None:
    """Check that a tensor has the same bytes on all ranks, whose digests these are."""
    if len(set(digests)) > 1:
        shown = ", ".join(
            f"{_ranks(rank for rank, one in enumerate(digests) if one == digest)} with digest "
            f"{digest & (1 << 64) - 1:016x}"
            for digest in dict.fromkeys(digests)
        )
        raise RankError(expected(name, f"the same values on every rank of {group}", shown))


def check_verify(verify: object) -> None:
    """Check the argument ``verify``."""
    if not (isinstance(verify, bool) or verify == VERIFY[-1]):
        raise ArgumentValueError(one_of("verify", VERIFY, verify))


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"
