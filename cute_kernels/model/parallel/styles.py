"""How each module of a model is cut: transformers' tensor-parallel plan, and what allows it."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..patch import state
from ..patch.classes import EXPERTS_PARALLEL
from ..patch.decisions import Decisions
from ..patch.state import Action
from . import checks

#: transformers' style -> ours, of a linear layer.
LINEARS = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
}
#: The style of a norm of each head, whose weight every rank has.
HEAD_NORM = "replicated_with_grad_allreduce"
#: config.model_type -> the dimension of heads in what such a norm gets.
HEAD_DIMS = {"qwen3": 2, "qwen3_moe": 2, "gemma3_text": 1}
#: The style of experts, and those of their parameters by name.
EXPERTS = "moe_tp_experts"
EXPERT_PARAMETERS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
#: config.model_type of the mixtures whose plan, besides experts, is known to be whole.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
#: Styles of the embedding and of the head, which are cut by the vocabulary.
_VOCABULARY = frozenset({"embedding_rowwise", "colwise_gather_output", "colwise_rep"})
#: Name of a linear layer of an attention -> the setting of the config that counts its heads.
_HEADS = {
    "q_proj": "num_attention_heads",
    "k_proj": "num_key_value_heads",
    "v_proj": "num_key_value_heads",
    "query_key_value": "num_attention_heads",
}


class Cut(NamedTuple):
    """How a module is cut.

    size: of the dimension that is cut, on all ranks together: N, K, entries of a vocabulary, or
    heads of a norm.  dim: of heads, in the input of a norm.
    """

    mesh: DeviceMesh
    size: int
    dim: int = 0


class Site(NamedTuple):
    """One module to cut: its forward ``kind``, and the dimension of its weight; None: all of it."""

    name: str
    module: torch.nn.Module
    kind: str
    cut: Cut
    axis: int | None
    cuts_bias: bool = False


class Layout(NamedTuple):
    """Sites of a model, and why its vocabulary is whole on every rank; None: it is cut."""

    sites: list[Site]
    whole: str | None


def layout(model: torch.nn.Module, mesh: DeviceMesh, decided: Decisions) -> Layout:
    """Decide how each module is cut.

    Raises:
        ArgumentTypeError, ArgumentValueError, PatchError: the model has no plan, or one with a
            style that is not carried; a part that is cut is not replaced; the mesh's degree does
            not cut it.  The message names it.
    """
    root, plan = checks.planned(state.pretrained_models(model))
    ends = root.get_input_embeddings(), root.get_output_embeddings()
    vocabulary = {_generic(name) for name, module in root.named_modules() if module in ends}
    styles = {n: s for n, s in plan.items() if s not in _VOCABULARY or n not in vocabulary}
    styles = _without_expert_parameters(root, styles)
    checks.styles(styles, {*LINEARS, HEAD_NORM, EXPERTS})
    replaced = {id(action.module): action for action in decided.actions}
    left = {part.name: part.known for part in decided.left}
    names = {id(module): name for name, module in model.named_modules()}
    sites, cuts = [], []
    for path, module in root.named_modules():
        style = styles.get(_generic(path))
        if style is None:
            continue
        name = names[id(module)]
        action = checks.replaced(name, replaced.get(id(module)), left.get(name), style)
        if style == HEAD_NORM:
            sites.append(_head_norm(action, root, path, mesh))
        elif style == EXPERTS:
            size = checks.expert_width(name, module)
            sites.append(Site(name, module, EXPERTS_PARALLEL, Cut(mesh, size), None))
            cuts += [(f"{name}.{parameter}", size, None) for parameter in EXPERT_PARAMETERS]
        else:
            sites.append(_linear(action, LINEARS[style], mesh))
            cuts.append((name, sites[-1].cut.size, _heads(root, path, style)))
    checks.degree(mesh, cuts)
    of_vocabulary, whole = _vocabulary(root, mesh, replaced)
    return Layout(sites + of_vocabulary, whole)


def _without_expert_parameters(root: torch.nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Styles of modules: those of the parameters of experts are checked, and left out."""
    wanted = {
        f"{name}.{parameter}": of_parameter
        for name, style in styles.items()
        for parameter, of_parameter in EXPERT_PARAMETERS.items()
        if style == EXPERTS
    }
    if wanted:
        checks.family(root, MIXTURES, "a mixture that is cut over ranks")
    checks.expert_parameters(wanted, styles)
    return {name: style for name, style in styles.items() if name not in wanted}


def _generic(path: str) -> str:
    """Name of a module as plans have it: layers.*.mlp for layers.3.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _linear(action: Action, kind: str, mesh: DeviceMesh) -> Site:
    n, k = action.module.weight.shape
    if kind.startswith("column"):
        return Site(action.name, action.module, kind, Cut(mesh, n), 0, True)
    return Site(action.name, action.module, kind, Cut(mesh, k), 1)


def _heads(root: torch.nn.Module, path: str, style: str) -> tuple[str, int] | None:
    """(Name, number) of the heads that a linear layer makes, where ranks get some of them."""
    setting = _HEADS.get(path.rpartition(".")[2])
    if setting is None or style != "colwise":
        return None
    config = root.config.get_text_config()
    return setting, getattr(config, setting, None) or config.num_attention_heads


def _head_norm(action: Action, root: torch.nn.Module, path: str, mesh: DeviceMesh) -> Site:
    config = root.config.get_text_config()
    dim = HEAD_DIMS[checks.family(root, HEAD_DIMS, "a family whose norms of heads are known")]
    queries = path.rpartition(".")[2].startswith("q")
    heads = config.num_attention_heads if queries else config.num_key_value_heads
    return Site(action.name, action.module, "head_norm", Cut(mesh, heads, dim), None)


def _vocabulary(
    root: torch.nn.Module, mesh: DeviceMesh, replaced: dict[int, Action]
) -> tuple[list[Site], str | None]:
    """Sites of the embedding and the head; or why both stay whole.

    Either may be tied to the other, so both are cut alike.
    """
    ends = [m for m in (root.get_input_embeddings(), root.get_output_embeddings()) if m is not None]
    actions = [replaced.get(id(module)) for module in ends]
    if not ends or None in actions:
        return [], "the embedding or the head is not replaced"
    entries = {module.weight.shape[0] for module in ends}
    reason = checks.why_not_vocabulary(entries, mesh.size())
    if reason is not None:
        return [], reason
    sites = []
    for action in actions:
        kind = action.kind if action.kind.startswith("embedding") else "head"
        cut = Cut(mesh, action.module.weight.shape[0])
        sites.append(Site(action.name, action.module, f"{kind}_parallel", cut, 0, kind == "head"))
    return sites, None
