"""Guards of what is added to a patched model after the patch: it raises when called.

``model.resize_token_embeddings``, adapters and assignments (``model.lm_head = ...``) register new
modules, whose forward is torch's.  A registration hook of torch looks at each module that is
registered in a patched model, and gives those that the patch would have replaced, or named as
moving bits, a forward pre-hook that raises.  So a training step pays nothing.

torch has no hook for the registration of hooks.  A pre-hook of each model of transformers compares
torch's count of all hooks of the process, and looks through the model where it has grown.  Hooks
that are new may look, and raise if they change something.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ...errors import PatchError, expected
from ...integrations.causal_lm import PATCH_MARK
from ...integrations.foreign_calls import HOOKS, Hook, Wrapper, foreign, foreign_global
from ...integrations.transformers import NAME as ATTENTION
from ...runtime.caching import capturing
from ..observe.watch import call_hook
from .decisions import by_modules
from .report import Kind, Left, Options
from .state import Attention, kind_of, pretrained_models, survey

# ---- refusals ------------------------------------------------------------------------------------


def _refuse_new(name: str, module: torch.nn.Module, args: tuple) -> None:
    """Refuse to run a module added to a patched model: its forward pre-hook."""
    want = "a module that ck.patch has seen (patch the model again after resize_token_embeddings,"
    want += " adapters or an assignment)"
    raise PatchError(expected(name, want, f"a new {type(module).__name__}"))


def _refuse_hook(name: str, hook: str) -> None:
    """Refuse to run a patched model with a hook that was added after the patch."""
    want = "only hooks that change nothing, after ck.patch (patch the model again: it is observed)"
    raise PatchError(expected(name or "the model", want, hook))


def _check_attention(value: torch.nn.Module) -> None:
    """Check that a patched model of transformers still has our attention."""
    name = value.config._attn_implementation
    if name != ATTENTION:
        want = f"{ATTENTION!r}, as ck.patch has set it (patch again; ck.unpatch takes it back)"
        raise PatchError(expected("attn_implementation", want, repr(name)))


#: Attribute of a module that must not run: the id of its hook.
_GUARD = "_cute_kernels_guard"
#: Attribute of a model that is looked at when it is called: the id of its hook.
_CURRENT = "_cute_kernels_current"
#: Attribute of a module in a part that the patch was told to skip.
_LEFT = "_cute_kernels_skipped"
#: Forwards that save launches or masks.
_FASTER = ("residual", "mlp", "base_model")


class Mark:
    """Options of the patch of a module; a process that loads one watches as well.

    moving: Parts of the patched model that were left and whose bits follow the batch.
    known: ids of the hooks that the patch has seen.
    """

    def __init__(
        self,
        options: Options,
        moving: tuple[str, ...] = (),
        known: frozenset[int] = frozenset(),
    ) -> None:
        watch()
        self.options, self.moving, self.known = options, moving, known

    def __reduce__(self) -> tuple[type, tuple[Options, tuple[str, ...], frozenset[int]]]:
        return Mark, (self.options, self.moving, self.known)


@functools.cache
def watch() -> None:
    """Watch every module that is registered from now on."""
    register_module_module_registration_hook(_registered)


class Current:
    """Forward pre-hook of a model: find hooks, and another attention, that came after the patch.

    attends: Whether its config named our attention.
    """

    def __init__(self, attends: bool) -> None:
        self._attends = attends
        self._known = frozenset(hook.id for hook in foreign_global())
        self._count = RemovableHandle.next_id

    def __call__(self, model: torch.nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            return
        if self._attends:
            _check_attention(model)
        count = RemovableHandle.next_id
        if count != self._count:
            for hook in foreign_global():
                if hook.id not in self._known:
                    _refuse_hook("every module", hook.text)
            for name, module in model.named_modules():
                _look_at(name, module)
            self._count = count


def _look_at(name: str, module: torch.nn.Module) -> None:
    """Put `Looking` in the place of the hooks that a module has got since it was patched."""
    if _LEFT in vars(module):
        return
    mark_of_module = vars(module).get(PATCH_MARK)
    for hook in foreign(module):
        hooks = vars(module)[hook.attribute]
        known = mark_of_module is not None and hook.id in mark_of_module.known
        if not known and not isinstance(hooks[hook.id], Looking):
            hooks[hook.id] = Looking(name, hook)


class Looking(Wrapper):
    """A hook that was added after the patch: it raises if it changes something."""

    def __init__(self, name: str, hook: Hook) -> None:
        super().__init__(hook)
        self._name, self._read = name, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return self.hook.function(*args, **kwargs)
        # A first call shows a write through .data, which has no version.
        contents = (not self._read or torch.is_inference_mode_enabled()) and not capturing()
        result, changes = call_hook(self.hook.function, args, kwargs, contents)
        if changes:
            _refuse_hook(self._name, self.hook.text)
        self._read = self._read or contents
        return result


def mark(
    model: torch.nn.Module,
    options: Options,
    left: Iterable[Left],
    attentions: Iterable[Attention],
) -> None:
    """Watch the modules and hooks that are added to a model, and its attention."""
    for module in model.modules():
        clear(module)
    known = frozenset(hook.id for module in model.modules() for hook in foreign(module))
    named = tuple(f"{one.name or 'the model'} ({one.part})" for one in left if one.moves)
    shared = Mark(options, named, known)
    for module in model.modules():
        vars(module)[PATCH_MARK] = shared
    ours = {id(module) for attention in attentions for module in attention.modules}
    for module in {id(m): m for m in (model, *pretrained_models(model))}.values():
        current = Current(id(module) in ours)
        handle = module.register_forward_pre_hook(current, prepend=True)
        vars(module)[_CURRENT] = handle.id


def options_of(module: torch.nn.Module) -> Options | None:
    """Return the options of the patch that a module is inside of; None: of none."""
    mark_of_module = vars(module).get(PATCH_MARK)
    return None if mark_of_module is None else mark_of_module.options


def leave(part: torch.nn.Module) -> None:
    """Neither watch nor guard a part that the patch was told to skip."""
    for module in part.modules():
        clear(module)
        vars(module)[_LEFT] = True


def clear(module: torch.nn.Module) -> None:
    """Let a module run and be changed again."""
    vars(module).pop(_LEFT, None)
    vars(module).pop(PATCH_MARK, None)
    for attribute in (_GUARD, _CURRENT):
        module._forward_pre_hooks.pop(vars(module).pop(attribute, None), None)
    for attribute in HOOKS:
        hooks = vars(module).get(attribute) or {}
        for key, hook in hooks.items():
            if isinstance(hook, Looking):
                hooks[key] = hook.hook.function


def _registered(parent: torch.nn.Module, name: str, new: torch.nn.Module | None) -> None:
    """Registration hook: guard the parts of a new module that the patch does not know."""
    before = parent._modules.get(name)
    inside = parent if before is None or PATCH_MARK in vars(parent) else before
    patched = vars(inside).get(PATCH_MARK)
    if patched is None or not isinstance(new, torch.nn.Module) or new is before:
        return
    decided = by_modules(survey(new), patched.options)
    # Without these forwards bytes are the same; the parts inside are guarded.
    needed = [action for action in decided.actions if action.kind not in _FASTER]
    parts = [(action.name, action.module) for action in needed]
    parts += [(attention.name, attention.modules[0]) for attention in decided.attentions]
    moving = (one for one in decided.left if one.moves and one.kind is not Kind.OPTION)
    parts += [(left.name, new.get_submodule(left.name)) for left in moving]
    for path, part in parts:
        if kind_of(part) is None and _GUARD not in vars(part) and PATCH_MARK not in vars(part):
            refuse = functools.partial(_refuse_new, f"{name}.{path}" if path else name)
            vars(part)[_GUARD] = part.register_forward_pre_hook(refuse).id
