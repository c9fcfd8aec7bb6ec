"""``ck.patch`` and ``ck.unpatch``: replace the ops of a whole model, in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ... import nn as own_modules
from ...integrations import transformers as integration
from . import checks, classes, families, guards, observed, rollback, skipping, softcaps
from .checks import CUT, Options
from .classes import Action
from .decisions import Decisions
from .forwards import positions
from .forwards.layers import FORWARDS, granularity, main_grad_parameters
from .report import Replaced, Report
from .scan import configs


def patch(
    model: torch.nn.Module,
    *,
    linear: bool = True,
    norm: bool = True,
    attention: bool = True,
    embedding: bool = True,
    logits: str = "linear_logp",
    order: str = "chain",
    main_grad: bool = False,
    strict: bool = False,
    skip: str | Sequence[str] | None = None,
    mesh: object | None = None,
) -> Report:
    """Replace, in place, the parts of a model whose bits follow the rest of the batch.

    A module keeps its parameters, names, hooks and identity, and gets another class: a subclass of
    its own, of the same name, whose forward calls an op of ours.  So the state dict,
    ``isinstance``, copies, pickles, ``save_pretrained``, adapters, checkpointing and
    ``fully_shard`` (before or after) stay as they were.  docs/model.md: what is replaced in which
    family.

    Args:
        model: Any module; what is inside a wrapper (PEFT, DDP, ``torch.compile``) is found.
        linear: nn.Linear, exactly: subclasses with a forward of their own are left.  transformers'
            Conv1D too.  Modules of ``ck.nn`` are left as well: they call the ops already, with
            their own ``order`` and ``main_grad``.
        norm: Norms, known or not: those whose forward agrees with the formula of ``ck.rms_norm`` or
            ``ck.layer_norm`` on random inputs.  And SiLU, GELU and tanh.
        attention: transformers' attention, and the tables of rotary embeddings.
        embedding: nn.Embedding, also below a subclass that scales what it looks up.
        logits: What becomes of a causal LM's head.  ``"linear"``: ``ck.linear``.
            ``"linear_logp"``: also, ``forward(labels=...)`` makes its loss by ``ck.linear_logp``;
            logits are None in training then.
        order: The order of summation of linear layers and heads, ``"chain"`` or ``"tree"``, as in
            ``ck.linear`` and ``ck.linear_logp``.  A model has one in rollout and in training.
        main_grad: Whether the gradient of a parameter that has a ``main_grad`` (fp32, its shape) is
            added there, as in ``ck.linear``.  It is looked for at each call.
        strict: Whether parts that are left, and whose bits follow the batch, are an error.
        skip: Full names of modules, or globs (``"model.visual"``, ``"*_tower"``), that are left
            as they are, with all that is inside, and that ``strict`` does not ask about: towers
            that are frozen or not run.  What they give to the others is the caller's promise, and
            the report names them.  Attention goes by config: a part that shares one with parts
            that are patched attends as they do.  Not with a mesh.
        mesh: One dimension of a device mesh, or a process group, of 1, 2, 4 or 8 ranks, over which
            the model is cut: attention by heads, MLPs by columns and rows, embedding and head by
            the vocabulary, as transformers' own tensor-parallel plan has them.  All parameters
            become DTensors, with this rank's part or replicated.  Every rank gives the same whole
            model, or one that transformers' tensor parallelism loaded, and ``order="tree"``.

    Returns:
        A `Report`: what was replaced, what was left, and what is known of it.

    Guarantees:
        Of a model whose report is ``complete``: each row of its logits has the same bits alone and
        in any batch, padded, in chunks, and decoded with a cache.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument is wrong; the message names it.
        BackendUnavailable: the parameters are on a device without a backend.
        MissingPackageError: the model is one of transformers, older than 5.4.
        PatchError: ``strict``, and parts are left; the message names them.  The model is unchanged.
            With a mesh: a part that is cut is left.
        ShapeError, RankError, DeviceError: the mesh cannot cut the model, or ranks have others.

    After an exception the model is as it was, unless it came while ranks cut parameters.

    A second patch of a model, or of a part of it, counts for every module inside, and forgets what
    the first had been told.  A module that is registered in a patched model later raises
    ``PatchError`` when it is called, if a patch would replace it or name it as moving bits: patch
    again after ``resize_token_embeddings``.  Logits are not those of the unpatched model, byte for
    byte: a norm of ours rounds once where transformers' rounds twice.
    """
    options = Options(linear, norm, attention, embedding, logits, order, main_grad, skip)
    options = checks.arguments(model, options, strict, mesh)
    parts = skipping.outermost(model, options.skip) if options.skip else []
    if configs.pretrained(model):
        integration.check_version()
    if strict:
        checks.complete(skipping.not_covered(model, parts))
    cutting = None if mesh is None else _cutting(model, mesh, options)
    decided = observed.decide(model, options) if cutting is None else cutting.decided
    if parts:
        decided = skipping.without(decided, parts)
    report = _report(model, decided, main_grad)
    if parts:
        report = replace(report, skipped=skipping.entries(model, parts))
    if strict:
        checks.complete(report.moving)
    if decided.attentions:
        integration.register()
    classes.prepare(decided.actions)
    with rollback.on_error(model):
        classes.apply(model, decided.actions)
        configs.apply(model, decided.attentions)
        guards.mark(model, options, report.moving, decided.attentions)
        for part in parts:
            guards.leave(model.get_submodule(part))
        if cutting is not None:
            cutting.apply(model)
    return report


def unpatch(model: torch.nn.Module) -> None:
    """Restore the class of every module of a model, and the config of the model.

    What was not patched is left alone.  Modules that wrap a patched model, or lie in it, may be
    given as well; parts of one transformers model share its attention.  A model that is cut over a
    mesh gets whole parameters again: all ranks of the mesh call this.

    Raises:
        ArgumentTypeError: ``model`` is no module.
        PatchError: the model is cut over a mesh, and by fully_shard.
    """
    checks.module(model)
    if any(CUT in vars(module) for module in model.modules()):
        from ..parallel import shard

        shard.restore(model)
    classes.apply(model, [])
    for module in model.modules():
        guards.clear(module)
    configs.restore(model)


def _cutting(model: torch.nn.Module, mesh: object, options: Options):
    """Return how a model is cut over a mesh."""
    from ..parallel import api as parallel

    return parallel.decide(model, mesh, options)


def _report(model: torch.nn.Module, decided: Decisions, main_grad: bool) -> Report:
    replaced = [entry for action in decided.actions for entry in _replaced(action)]
    replaced += [
        Replaced(a.name, "attention", "attn_implementation='cute_kernels'")
        for a in decided.attentions
    ]
    replaced += decided.softcaps
    sites = [(action.module, action.kind) for action in decided.actions]
    # Modules of ck.nn keep their forward, and their own main_grad option.
    own_sites = [(m, kind) for m in model.modules() if (kind := own_modules.kind_of(m)) is not None]
    missed: list[str] = []
    shared: list[str] = []
    broadcast: list[str] = []
    if main_grad:
        writers = sites + [(module, kind) for module, kind in own_sites if module.main_grad]
        write_counts = Counter(id(p) for site in writers for p in main_grad_parameters(*site))
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        missed = [name for name, p in trainable if id(p) not in write_counts]
        shared = [name for name, p in trainable if write_counts[id(p)] > 1]
        looked_up = [(a.name, a.module) for a in decided.actions if a.kind.startswith("embedding")]
        position_modules = [a.module for a in decided.actions if a.kind == "positions"]
        ids = {id(m.weight) for _, m in positions.broadcast(looked_up, position_modules)}
        broadcast = [name for name, p in trainable if id(p) in ids]
    tokens = max((granularity(*site) for site in sites + own_sites), default=1)
    parts = map(tuple, (replaced, decided.left, missed, shared, broadcast))
    return Report(families.of(model), *parts, granularity=tokens, ran=decided.ran)


def _replaced(action: Action) -> list[Replaced]:
    """Entries of the report for an action: a module's forward, or a causal LM's loss."""
    cls, notes = classes.user_class(action.module), action.notes
    if action.kind != "causal_lm":
        return [Replaced(action.name, cls.__name__, FORWARDS[action.kind].by)]
    entries = []
    if notes.softcap:
        part = softcaps.part_of_logits(cls, notes.softcap)
        by = FORWARDS[action.kind].by if notes.logp else "ck.tanh"
        entries.append(Replaced(action.name, part, by))
    if notes.logp:
        entries.append(Replaced(action.name, f"{cls.__name__}: loss", "ck.linear_logp"))
    return entries
