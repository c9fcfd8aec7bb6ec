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
        # Groups of one size share its cuts; alone, a rank has nothing to exchange.
        share = slice(sizes[:at].count(degree), None, sizes.count(degree) if degree > 1 else 2)
        for i, cut in list(enumerate(cuts_of(degree)))[share]:
            found = differing(cut, value, rank, main_grad=i % 3 == 0)
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

    half = torch.float16
    state = ones(ROWS, WIDTH)
    some = "RankError or "
    value, kind, shape = "ArgumentValueError", "ArgumentTypeError", "ShapeError"
    starts = "vocab_start"
    return [
        # where shards lie
        ("a gap", call(vocab_start=start + 16 * last), "RankError", [starts, "208: a gap"]),
        ("an overlap", call(vocab_start=start - 16 * last), "RankError", ["176: an overlap"]),
        ("a hole at 0", call(vocab_start=start + 16), "RankError", [starts, "rank 0 at 0", "gap"]),
        ("all at 0", call(vocab_start=0), "RankError", ["0: an overlap", "rank 1 at 64"]),
        ("other way round", call(vocab_start=ROWS * (3 - rank)), "RankError", ["192: a gap"]),
        ("rows behind", call(vocab_size=300), "RankError", ["vocab_size", "300", "256 rows"]),
        ("rows of one", call(weight=ones(48 if last else 64, WIDTH)), "RankError", ["240 rows"]),
        ("no vocab_size", call(vocab_size=None), value, ["vocab_size", "there is a group"]),
        (
            "vocab_size of some",
            call(vocab_size=None if last else VOCAB),
            some + value,
            ["expected"],
        ),
        ("vocab_sizes", call(vocab_size=VOCAB - 16 * last), "RankError", ["256, 256, 256, 240"]),
        ("start in a unit", call(vocab_start=start + 8), value, [starts, "multiple of 16"]),
        ("start below 0", call(vocab_start=-16), value, [starts, "0 or more", "-16"]),
        (
            "start in a leaf",
            call(
                grad=True,
                vocab_start=max(0, start - 16),
                weight=ones(ROWS - 16 * (rank == 0) + 16 * last, 8),
            ),
            some + shape,
            ["expected"],
        ),
        ("chain", call(grad=True, order="chain"), value, ["order", "'tree'", "'chain'"]),
        # what ranks have not alike
        (
            "tokens",
            call(hidden=ones(5 + last, WIDTH), target=torch.arange(5 + last)),
            "RankError",
            ["tokens", "5, 5, 5, 6"],
        ),
        ("weight of one", call(weight=ones(ROWS, WIDTH, dtype=half) if last else ones(ROWS, 8)),
         some + "DtypeError", ["expected"]),
        (
            "dtype of one",
            call(**({"hidden": ones(5, 8, dtype=half), "weight": ones(64, 8, dtype=half)}
                    if last else {})),
            "RankError",
            ["dtype", "torch.float32, torch.float16"],
        ),
        (
            "width of one",
            call(**({"hidden": ones(5, 16), "weight": ones(64, 16)} if last else {})),
            "RankError",
            ["D of weight", "8, 8, 8, 16"],
        ),
        ("orders", call(order="chain" if last else "tree"), "RankError", ["order", "tree, chain"]),
        ("entropy of some", call(return_entropy=last), "RankError", ["return_entropy", "0, 1"]),
        ("bias of some", call(bias=ones(ROWS) if last else None), "RankError", ["bias", "0, 1"]),
        ("gradients of some", call(grad=last), "RankError", ["hidden.requires_grad", "0, 1"]),
        ("temperatures", call(temperature=0.5 if last else 1), "RankError", ["temperature", "0.5"]),
        ("taus", call(temperature=ones(5) + last), "RankError", ["temperature", *SHARED]),
        ("order of taus", call(temperature=ramp(last) + 1.0), "RankError",
         ["temperature", *SHARED]),
        ("tau and taus", call(temperature=ones(5) if last else 1.0), "RankError",
         ["temperature", *SHARED]),
        ("targets", call(target=torch.arange(5) + last), "RankError", ["target", *SHARED]),
        ("order of targets", call(target=ramp(last)), "RankError", ["target", *SHARED]),
        ("masked targets", call(target=torch.arange(5).where(torch.arange(5) != last * 4, -100)),
         "RankError", ["target", *SHARED]),
        ("hidden", call(hidden=ones(5, WIDTH) + last, verify="all"), "RankError",
         ["hidden", *SHARED]),
        ("verify", call(verify="some"), value, ["verify", "True", "'all'", "'some'"]),
        ("unverified start", call(verify=False, vocab_start=start + 16), value,
         [starts, "64 rows"]),
        ("unverified size", call(verify=False, vocab_size=300), value, ["vocab_size", "256"]),
        ("softcaps", call(softcap=30.0 * last), "RankError", ["softcap", "0.0, 30.0"]),
        ("ignored", call(ignore_index=-1 - last), "RankError", ["ignore_index", "-1, -2"]),
        ("a target", call(target=torch.arange(5) + 300 * last), some + value, ["expected"]),
        ("a list", call(hidden=[1.0] if last else ones(5, 8)), some + kind, ["expected"]),
        ("a device", call(**({"hidden": ones(5, 8, device="meta")} if last else {})),
         some + "DeviceError", ["expected"]),
        ("bias's shape", call(bias=ones(ROWS + last)), some + shape, ["expected"]),
        ("temperature 0", call(temperature=0.0 if last else 1.0), some + value, ["expected"]),
        # what all have wrong
        ("order", call(order="ring"), value, ["order", "'ring'"]),
        ("main_grad", call(main_grad=ones(VOCAB, WIDTH)), shape, ["main_grad", "[64, 8]"]),
        ("fp64", call(hidden=ones(5, 8).double()), "DtypeError", ["hidden", "float64"]),
        (
            "an alias on one rank",
            call(weight=state, main_grad=state if last else ones(ROWS, WIDTH)),
            some + "AliasError",
            ["expected"],
        ),
        # the group
        ("group 4", call(group=4), kind, ["group", "DeviceMesh", "int"]),
        ("square", call(group=square), value, ["group", "1 dimension", "('a', 'b')"]),
        ("backwards", call(group=backwards), value, ["group", "ascending", "[3, 2, 1, 0]"]),
        ("trio", call(group=trio, vocab_size=192), "" if not last else value, []),
    ]  # fmt: skip


def refused(rank: int, group) -> dict:
    said = {}
    for name, call, want, fragments in bad_inputs(rank, group):
        result = {"type": "", "said": "", "want": want, "fragments": fragments}
        try:
            call()
        except Exception as error:
            result |= {"type": type(error).__name__, "said": str(error)}
        said[name] = result
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
