"""``ck.patch(mesh=)``: cut a model over ranks while it is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...integrations import tensor_parallel
from ..patch import decisions
from ..patch.decisions import Decisions
from ..patch.report import Kind, Left, Options
from . import checks, shard, styles


def decide(
    model: torch.nn.Module, mesh: object, options: Options
) -> tuple[Decisions, Callable[[], None]]:
    """Decide how a model is patched and cut over the ranks of a mesh; nothing is changed.

    Returns:
        The decisions, and a function that keeps this rank's parts of the parameters.

    Raises:
        RankError: ranks have other models, options or values.
        Others: as ``ck.patch``.
    """
    mesh = checks.mesh_of(mesh, model)
    refusal, described = None, []
    try:
        tensor_parallel.check_order(options.order)
        with shard.described_whole(model):
            decided = decisions.decide(model, options)
            layout = styles.layout(model, mesh, decided)
        shard.check_bare(layout)
        described = [str(options), *shard.describe(layout)]
    except Exception as error:
        refusal = error
    checks.same_ranks(model, described, refusal, mesh.get_group())
    kinds = {id(site.module): site.kind for site in layout.sites}
    for position, action in enumerate(decided.actions):
        kind = kinds.get(id(action.module), action.kind)
        decided.actions[position] = action._replace(kind=kind)
    if layout.whole is not None:
        reason = f"{layout.whole}: every rank has all of it"
        decided.left.append(Left("", "vocabulary", reason, False, Kind.ELSEWHERE))
    return decided, functools.partial(shard.cut, model, layout, mesh)
