"""``ck.patch`` and ``ck.unpatch``: replace the ops of a whole model, in place."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ... import nn as own_modules
from ...errors import ArgumentTypeError, ArgumentValueError, PatchError, expected, one_of
from ...gemm.config import K_GROUP, ORDERS
from ...linear_attn.config import group_part_rows
from ...norm.config import part_rows
from ...runtime import checking
from . import classes, decisions, guards, state
from .classes import EXPERTS_PARALLEL, FORWARDS, PARALLEL_PRODUCTS
from .decisions import Decisions
from .forwards import authors, mixers
from .pretrained import cap_part, why_not_covered
from .report import CUT, LOGITS, LOGP, Kind, Left, Options, Replaced, Report, Skipped
from .state import Action, Notes, kind_of, user_class

_PRODUCTS = ("linear", "head", "conv1d", *PARALLEL_PRODUCTS)

# ---- arguments -----------------------------------------------------------------------------------
#: Lines of reasons in a refusal, and what follows them.
_REASONS = 3
_ADVICE = (
    "Complete models: docs/model_families.md. Without strict the rest is patched, and "
    "ck.audit(model, ids) shows what differs; skip= leaves out parts that are not run."
)
#: Options with a fixed set of names.
CHOICES = {"logits": (LOGP, LOGITS), "order": ORDERS}


def _checked(model: object, options: Options, strict: object, mesh: object) -> Options:
    """Check the arguments of a patch; return its options, with a tuple of names to skip."""
    patterns = _patterns(options.skip)
    options = options._replace(skip=patterns)
    _check_module(model)
    for name, value in {**options._asdict(), "strict": strict}.items():
        if name not in (*CHOICES, "skip") and not isinstance(value, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(value)))
    for name, choices in CHOICES.items():
        value = getattr(options, name)
        if not isinstance(value, str):
            raise ArgumentTypeError(expected(name, "a string", repr(value)))
        if value not in choices:
            raise ArgumentValueError(one_of(name, choices, value))
    for device in {p.device for p in model.parameters()}:
        checking.supported("linear", device)
    if mesh is not None and patterns:
        raise ArgumentValueError(expected("skip", "none with a mesh", list(patterns)))
    for name, part in model.named_modules():
        if mesh is None and CUT in vars(part):
            want = f"the mesh that {name or 'the model'} is cut over (or ck.unpatch it first)"
            raise ArgumentValueError(expected("mesh", want, None))
    return options


def _check_module(value: object) -> None:
    """Check that a model is a module with a Python forward."""
    if not isinstance(value, torch.nn.Module):
        raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(value).__name__))
    if isinstance(value, torch.jit.ScriptModule):
        want = "a torch.nn.Module whose forward is Python's"
        raise ArgumentTypeError(expected("model", want, f"TorchScript ({type(value).__name__})"))


def _patterns(value: object) -> tuple[str, ...]:
    patterns = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple) or not all(isinstance(p, str) for p in patterns):
        raise ArgumentTypeError(expected("skip", "names of modules", repr(value)))
    return tuple(patterns)


def _check_complete(moving: tuple[Left, ...]) -> None:
    """Check, for ``strict``, that no part is left whose bits follow the batch.

    The message has a line for a class and reason, three at most, each class before a second reason.
    """
    if not moving:
        return
    groups: dict[tuple[str, str, Kind], list[str]] = {}
    for part in moving:
        names = groups.setdefault((part.part, part.known, part.kind), [])
        names.append(part.name or "the model")
    first = dict(reversed([(part, known) for part, known, _ in groups]))

    def rank(group: tuple[str, str, Kind]) -> int:
        part, known, kind = group
        if kind is Kind.NOT_OBSERVED:
            return 0
        # A name in bytecode is no proof.
        return 1 if first[part] == known and kind is not Kind.NAMED else 2

    order = sorted(groups, key=rank)
    lines = []
    for part, known, kind in order[:_REASONS]:
        names = groups[part, known, kind]
        others = f"; also in {len(names) - 1} more, {names[1]}" if len(names) > 1 else ""
        lines.append(f"  {names[0]} ({part}): {known}{others}")
    if len(order) > _REASONS:
        lines.append(f"  {len(order) - _REASONS} more reasons: print(ck.patch(model))")
    want = f"no part left whose bits follow the batch, got {len(moving)}"
    raise PatchError("\n".join([f"strict: expected {want}:", *lines, _ADVICE]))


# ---- parts that are skipped ----------------------------------------------------------------------


def _skipped(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Return the names of the outermost modules that patterns name: a name, or a glob of names.

    Raises:
        ArgumentValueError: a pattern names no module, or the model itself.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names[1:] if name and fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            want = "the full name of a module inside, or a glob of such names"
            longer = [repr(name) for name in names if name.endswith(f".{pattern}")]
            want += f" (such as {longer[0]})" if longer else ""
            raise ArgumentValueError(expected("skip", want, repr(pattern)))
        chosen.update(matches)
    return [n for n in names if n in chosen and not _is_inside(n.rpartition(".")[0], chosen)]


def _is_inside(name: str, parts: Iterable[str]) -> bool:
    """Whether a module is one of the parts, or lies in one."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


def _not_covered(model: torch.nn.Module, parts: list[str]) -> tuple[Left, ...]:
    """Return the first model outside of these parts that is known not to be covered."""
    for name, module in model.named_modules():
        reason = why_not_covered(getattr(module, "config", None))
        if reason is not None and not _is_inside(name, parts):
            return (Left(name, user_class(module).__name__, reason),)
    return ()


def _without(decided: Decisions, parts: list[str]) -> Decisions:
    """Return decisions that neither change nor name what is in these parts."""
    if not parts:
        return decided
    named = {n: getattr(decided, n) for n in ("actions", "attentions", "left", "softcaps")}
    outside = {n: [e for e in v if not _is_inside(e.name, parts)] for n, v in named.items()}
    ran = tuple(one for one in decided.ran if not _is_inside(one[0], parts))
    return decided._replace(ran=ran, **outside)


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

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> report = ck.patch(model)
        >>> type(model[0]).__name__
        'Linear'
    """
    options = Options(linear, norm, attention, embedding, logits, order, main_grad, skip)
    options = _checked(model, options, strict, mesh)
    parts = _skipped(model, options.skip)
    if strict:
        _check_complete(_not_covered(model, parts))
    cut = None
    if mesh is None:
        decided = _without(decisions.decide(model, options), parts)
    else:
        from ..parallel import shard

        decided, cut = shard.decide(model, mesh, options)
    skipped = []
    for name, module in ((name, model.get_submodule(name)) for name in parts):
        trained = any(p.requires_grad for p in module.parameters())
        skipped.append(Skipped(name, user_class(module).__name__, trained))
    report = replace(_report(model, decided, main_grad), skipped=tuple(skipped))
    if strict:
        _check_complete(report.moving)
    changes = classes.prepare(decided.actions)
    with state.applied(model, changes, decided.attentions):
        guards.mark(model, options, decided.left, decided.attentions)
        for part in parts:
            guards.leave(model.get_submodule(part))
        if cut is not None:
            cut()
    return report


def unpatch(model: torch.nn.Module) -> None:
    """Restore the class of every module of a model, and the config of the model.

    What was not patched is left alone.  Modules that wrap a patched model, or lie in it, may be
    given as well; parts of one transformers model share its attention.  A model that is cut over a
    mesh gets whole parameters again: all ranks of the mesh call this.

    Raises:
        ArgumentTypeError: ``model`` is no module.
        PatchError: the model is cut over a mesh, and by fully_shard.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> _ = ck.patch(model)
        >>> ck.unpatch(model)
    """
    _check_module(model)
    if any(CUT in vars(module) for module in model.modules()):
        from ..parallel import shard

        shard.restore(model)
    state.apply(model)
    for module in model.modules():
        guards.clear(module)


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
    missed, shared, broadcast = [], [], []
    if main_grad:
        writers = sites + [(module, kind) for module, kind in own_sites if module.main_grad]
        write_counts = Counter(id(p) for site in writers for p in _main_grad_parameters(*site))
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        missed = [name for name, p in trainable if id(p) not in write_counts]
        shared = [name for name, p in trainable if write_counts[id(p)] > 1]
        looked_up = [(a.name, a.module) for a in decided.actions if a.kind.startswith("embedding")]
        position_modules = [a.module for a in decided.actions if a.kind == "positions"]
        ids = {id(m.weight) for _, m in authors.broadcast_embeddings(looked_up, position_modules)}
        broadcast = [name for name, p in trainable if id(p) in ids]
    cuts = [_granularity(a.module, a.kind, a.notes) for a in decided.actions]
    cuts += [_granularity(*site) for site in own_sites]
    tokens = max(cuts, default=1)
    parts = map(tuple, (replaced, decided.left, missed, shared, broadcast))
    return Report(decided.family, *parts, granularity=tokens, ran=decided.ran)


def _replaced(action: Action) -> list[Replaced]:
    """Entries of the report for an action: a module's forward, or a causal LM's loss."""
    cls, notes = user_class(action.module), action.notes
    if action.kind != "causal_lm":
        return [Replaced(action.name, cls.__name__, FORWARDS[action.kind].by)]
    entries = []
    if notes.softcap:
        part = cap_part(cls, notes.softcap)
        by = FORWARDS[action.kind].by if notes.logp else "ck.tanh"
        entries.append(Replaced(action.name, part, by))
    if notes.logp:
        entries.append(Replaced(action.name, f"{cls.__name__}: loss", "ck.linear_logp"))
    return entries


def _main_grad_parameters(module: torch.nn.Module, kind: str) -> list[torch.Tensor]:
    """Return the parameters whose gradients a forward can add to a ``main_grad``."""
    if kind in ("invariant", "experts", EXPERTS_PARALLEL, "scores"):
        return []
    names = mixers.MAIN_GRADS.get(kind, module._parameters if "norm" in kind else ("weight",))
    return [p for p in map(module._parameters.get, names) if p is not None]


def _granularity(module: torch.nn.Module, kind: str, notes: Notes | None = None) -> int:
    """Token count at whose multiples micro-batches may be cut, by this module."""
    if "norm" in kind:
        # A token has one row, or one for each head.
        size = None if notes is None else notes.group_size
        rows = group_part_rows if kind == "gated_rms_norm" else part_rows
        return max((rows(size or p.numel()) for p in module.parameters(recurse=False)), default=1)
    return K_GROUP if kind in _PRODUCTS else 1


def granularity_of(model: torch.nn.Module) -> int:
    """Token count at whose multiples micro-batches may be cut, by the patched modules."""
    kinds = ((m, kind_of(m), getattr(m, "_cute_kernels", None)) for m in model.modules())
    # Each is a power of two, so the largest is a multiple of all.
    return max((_granularity(*each) for each in kinds if each[1]), default=1)
