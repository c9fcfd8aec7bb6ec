"""One of four ranks of a vocabulary that is cut, over gloo on a CPU.

`report` has which results differed from one rank's, and what was refused.  In `killed`, of three,
rank 1 kills itself before its backward, and the others report what they get.
"""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cute_kernels as ck
from tests.logp.shard_cases import cuts_of, differing, forward_cuts_of

WORLD = 4
VOCAB, ROWS, WIDTH = 256, 64, 8  # leaves of 32


def groups_of(rank: int) -> list:
    """Of 4: a mesh and all ranks; of 2: two others in a mesh, and a group; of this rank alone."""
    one = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    alone = [dist.new_group([each]) for each in range(WORLD)]
    return [one, two["dp"], pairs[rank // 2], alone[rank]]


def bytes_compared(every: list) -> dict:
    wrong, compared = [], 0
    groups = [value.get_group() if isinstance(value, DeviceMesh) else value for value in every]
    sizes = [group.size() for group in groups]
    for at, (value, group) in enumerate(zip(every, groups, strict=True)):
        degree, rank = group.size(), group.rank()
        # Groups of one size share every third of its cuts; test_shards.py has all of them.
        share = slice(sizes[:at].count(degree), None, 3 * sizes.count(degree))
        for i, cut in list(enumerate(cuts_of(degree)))[::-1][share]:
            found = differing(cut, value, rank, main_grad=i % 2 == 0)
            wrong += [f"{name} of {cut} x {degree}" for name in found]
            compared += 1
        for cut in forward_cuts_of(degree)[share]:
            found = differing(cut, value, rank, hidden=False)
            wrong += [f"{name} of {cut} x {degree}, forward" for name in found]
            compared += 1
    return {"differing": wrong, "compared": compared, "sizes": sizes}


def empty(group) -> dict:
    """Without tokens, gradients are zeros, on every rank."""
    rank = dist.get_rank()
    hidden, weight = (torch.ones(rows, WIDTH).requires_grad_() for rows in (0, ROWS))
    logp, entropy = ck.linear_logp(
        hidden, weight, torch.zeros(0, dtype=torch.long), group=group, vocab_start=ROWS * rank,
        vocab_size=VOCAB, order="tree", return_entropy=True,
    )  # fmt: skip
    (logp.sum() + entropy.sum()).backward()
    return {"shapes": [list(logp.shape), list(hidden.grad.shape)], "any": bool(weight.grad.any())}


#: What a message about differing values has besides the argument.
SHARED = ("same values on every rank of group", "ranks 0, 1, 2 with", "rank 3 with")


def ramp(reverse: bool) -> torch.Tensor:
    """0 to 4, in this order or the other."""
    return torch.arange(5).flip(0) if reverse else torch.arange(5)


def uncompared(rank: int, group) -> list[str]:
    """Calls that pass: values that are not asked for, and equal values of other dtypes."""
    last = rank == WORLD - 1
    place = {"group": group, "vocab_start": ROWS * rank, "vocab_size": VOCAB}

    def call(hidden, target, **options):
        return lambda: ck.linear_logp(hidden, torch.ones(ROWS, WIDTH), target, **place, **options)

    hidden, taus = torch.ones(5, WIDTH), torch.ones(5)
    calls = {
        "hidden": call(hidden + rank, ramp(False)),
        "dtype of target": call(hidden, ramp(False).to(torch.int32 if last else torch.int64)),
        "dtype of taus": call(hidden, ramp(False), temperature=taus.half() if last else taus),
        "unverified": call(hidden, ramp(last), temperature=taus + rank, verify=False),
    }
    return [name for name, run in calls.items() if run().shape != (5,)]


def bad_inputs(rank: int, group) -> list[tuple]:
    """(what is wrong, a call, the exceptions that ranks may raise, fragments of all messages)."""
    trio, backwards = dist.new_group([0, 1, 2]), DeviceMesh("cpu", [3, 2, 1, 0])
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    last, start = rank == WORLD - 1, ROWS * rank

    def call(grad: bool = False, **changed):
        hidden = torch.ones(5, WIDTH).requires_grad_(grad)
        given = {"hidden": hidden, "weight": torch.ones(ROWS, WIDTH), "order": "tree"}
        given |= {"target": torch.arange(5), "group": group, "vocab_start": start}
        given |= {"vocab_size": VOCAB} | changed
        return lambda: ck.linear_logp(
            given.pop("hidden"), given.pop("weight"), given.pop("target"), **given
        )

    def ones(*shape, dtype=torch.float32, **options):
        return torch.ones(shape, dtype=dtype, **options)

    half, state, odd = torch.float16, ones(ROWS, WIDTH), torch.arange(5)
    starts, rank_error = "vocab_start", "RankError"
    value, kind, shape = "ArgumentValueError", "ArgumentTypeError", "ShapeError"

    def one(**changed):
        """The last rank alone has these arguments."""
        return call(**changed) if last else call()

    def differ(argument: str, *fragments: str, **changed) -> tuple:
        return (argument, one(**changed), rank_error, [argument, *(fragments or SHARED)])

    def either(name: str, error: str, **changed) -> tuple:
        """The last rank raises its own error, the others that error or of the ranks."""
        return (name, one(**changed), f"{rank_error} or {error}", ["expected"])

    others = [
        # where shards lie
        ("a gap", call(vocab_start=start + 16 * last), rank_error, [starts, "208: a gap"]),
        ("an overlap", call(vocab_start=start - 16 * last), rank_error, ["176: an overlap"]),
        ("a hole at 0", call(vocab_start=start + 16), rank_error, [starts, "rank 0 at 0", "gap"]),
        ("other way round", call(vocab_start=ROWS * (3 - rank)), rank_error, ["192: a gap"]),
        ("rows behind", call(vocab_size=300), rank_error, ["vocab_size", "300", "256 rows"]),
        ("rows of one", one(weight=ones(48, WIDTH)), rank_error, ["240 rows"]),
        ("no vocab_size", call(vocab_size=None), value, ["vocab_size", "there is a group"]),
        ("start in a unit", call(vocab_start=start + 8), value, [starts, "multiple of 16"]),
        (
            "start in a leaf",
            call(
                grad=True,
                vocab_start=max(0, start - 16),
                weight=ones(ROWS - 16 * (rank == 0) + 16 * last, 8),
            ),
            f"{rank_error} or {shape}",
            ["expected"],
        ),
        ("chain", call(grad=True, order="chain"), value, ["order", "'tree'", "'chain'"]),
        ("verify", call(verify="some"), value, ["verify", "True", "'all'", "'some'"]),
        ("unverified", call(verify=False, vocab_start=start + 16), value, [starts, "64 rows"]),
        ("unverified size", call(verify=False, vocab_size=300), value, ["vocab_size", "256"]),
        # what all have wrong
        ("order", call(order="ring"), value, ["order", "'ring'"]),
        ("main_grad", call(main_grad=ones(VOCAB, WIDTH)), shape, ["main_grad", "[64, 8]"]),
        # the group
        ("group 4", call(group=4), kind, ["group", "DeviceMesh", "int"]),
        ("square", call(group=square), value, ["group", "1 dimension", "('a', 'b')"]),
        ("backwards", call(group=backwards), value, ["group", "ascending", "[3, 2, 1, 0]"]),
        ("trio", call(group=trio, vocab_size=192), "" if not last else value, []),
    ]
    return [
        *others,
        # what ranks have not alike
        differ("vocab_size", "256, 256, 256, 240", vocab_size=VOCAB - 16),
        differ("tokens", "5, 5, 5, 6", hidden=ones(6, WIDTH), target=torch.arange(6)),
        differ("dtype", "float32, torch.float16", hidden=ones(5, 8, dtype=half),
               weight=ones(64, 8, dtype=half)),
        differ("D of weight", "8, 8, 8, 16", hidden=ones(5, 16), weight=ones(64, 16)),
        differ("order", "tree, chain", order="chain"),
        differ("return_entropy", "0, 1", return_entropy=True),
        differ("bias", "0, 1", bias=ones(ROWS)),
        differ("hidden.requires_grad", "0, 1", grad=True),
        differ("temperature", "0.5", temperature=0.5),
        differ("softcap", "0.0, 30.0", softcap=30.0),
        differ("ignore_index", "-100, -2", ignore_index=-2),
        differ("target", target=odd + 1),
        differ("target", target=ramp(True)),
        differ("target", target=odd.where(odd != 4, -100)),
        differ("temperature", temperature=ones(5)),
        ("taus", call(temperature=ones(5) + last), rank_error, ["temperature", *SHARED]),
        ("order of taus", call(temperature=ramp(last) + 1.0), rank_error, ["temperature", *SHARED]),
        ("hidden", call(hidden=ones(5, WIDTH) + last, verify="all"), rank_error,
         ["hidden", *SHARED]),
        # what one has wrong
        either("vocab_size of some", value, vocab_size=None),
        either("weight of one", "DtypeError", weight=ones(ROWS, WIDTH, dtype=half)),
        either("a target", value, target=odd + 300),
        either("a list", kind, hidden=[1.0]),
        either("a device", "DeviceError", hidden=ones(5, 8, device="meta")),
        either("bias's shape", shape, bias=ones(ROWS + 1)),
        either("an alias", "AliasError", weight=state, main_grad=state),
    ]  # fmt: skip


def refused(rank: int, group) -> dict:
    said = {}
    for at, (name, call, want, fragments) in enumerate(bad_inputs(rank, group)):
        result = {"type": "", "said": "", "want": want, "fragments": fragments}
        try:
            call()
        except Exception as error:
            result |= {"type": type(error).__name__, "said": str(error)}
        said[f"{at} {name}"] = result
    return said


def killed() -> dict:
    """Rank 1 is gone after the forward; the backward of the others exchanges leaves."""
    rank = dist.get_rank()
    hidden = torch.ones(5, WIDTH).requires_grad_()
    logp = ck.linear_logp(
        hidden, torch.ones(ROWS, WIDTH), torch.arange(5), group=dist.group.WORLD, order="tree",
        vocab_start=ROWS * rank, vocab_size=ROWS * (WORLD - 1),
    )  # fmt: skip
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        logp.sum().backward()
        ended = "well"
    except Exception as error:
        ended = type(error).__name__
    return {"ended": ended, "grad": hidden.grad is not None}


def report() -> dict:
    rank = dist.get_rank()
    every = groups_of(rank)
    report = {"bytes": bytes_compared(every), "refused": refused(rank, every[0])}
    after = [differing(cut, every[0], rank) for cut in cuts_of(WORLD)[:2]]
    report |= {"after": after, "empty": empty(every[0])}
    return report | {"uncompared": uncompared(rank, every[0])}
