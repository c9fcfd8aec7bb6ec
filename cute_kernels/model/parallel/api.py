"""``ck.patch(mesh=)``: cut a model over ranks while it is patched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...integrations import tensor_parallel
from ..patch import decisions
from ..patch.decisions import Decisions
from ..patch.report import Kind, Left, Options
from . import checks, shard, styles


class Cutting(NamedTuple):
    """The decisions about a model whose parts are cut, and how."""

    decided: Decisions
    layout: styles.Layout
    mesh: DeviceMesh

    def apply(self, model: torch.nn.Module) -> None:
        """Keep this rank's parts of the parameters."""
        shard.cut(model, self.layout, self.mesh)


def decide(model: torch.nn.Module, mesh: object, options: Options) -> Cutting:
    """Decide how a model is patched and cut over the ranks of a mesh; nothing is changed.

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
    return Cutting(decided, layout, mesh)
