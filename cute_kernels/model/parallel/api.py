"""``ck.patch(mesh=)``: cut a model over ranks while it is patched."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..patch import observed
from ..patch import plan as patch_plan
from ..patch.checks import Options
from ..patch.report import Left
from . import checks, shard, styles


class Cutting(NamedTuple):
    """A patch plan of a model whose parts are cut, and how."""

    plan: patch_plan.Plan
    layout: styles.Layout
    mesh: DeviceMesh

    def apply(self, model: torch.nn.Module) -> None:
        """Keep this rank's parts of the parameters."""
        shard.cut(model, self.layout, self.mesh)


def plan(model: torch.nn.Module, mesh: object, options: Options) -> Cutting:
    """Plan a patch that cuts a model over the ranks of a mesh; nothing is changed.

    Raises:
        RankError: ranks have other models, options or values.
        Others: as ``ck.patch``.
    """
    mesh = checks.mesh_of(mesh, model)
    refusal, described = None, []
    try:
        checks.order(options.order)
        with shard.described_whole(model):
            model_plan = observed.decide(model, options)
            layout = styles.layout(model, mesh, model_plan)
        shard.check_bare(layout)
        described = [str(options), *shard.describe(layout)]
    except Exception as error:
        refusal = error
    checks.same_ranks(model, described, refusal, mesh.get_group())
    kinds = {id(site.module): site.kind for site in layout.sites}
    for position, action in enumerate(model_plan.actions):
        kind = kinds.get(id(action.module), action.kind)
        model_plan.actions[position] = action._replace(kind=kind)
    if layout.whole is not None:
        reason = f"{layout.whole}: every rank has all of it"
        model_plan.left.append(Left("", "vocabulary", reason, False))
    return Cutting(model_plan, layout, mesh)
