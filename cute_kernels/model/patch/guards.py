"""Guards of modules added to a patched model after the patch: they raise when called.

``model.resize_token_embeddings``, adapters and assignments (``model.lm_head = ...``) register new
modules, whose forward is torch's.  A registration hook of torch looks at each module that is
registered in a patched model, and gives those that the patch would have replaced, or named as
moving bits, a forward pre-hook that raises.  So a training step pays nothing.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from ...integrations.causal_lm import PATCH_MARK
from . import checks
from . import plan as patch_plan
from .checks import Options
from .classes import kind_of
from .report import Left

_MARK = PATCH_MARK
#: Attribute of a module that must not run: the id of its hook.
_GUARD = "_cute_kernels_guard"
#: Forwards that save launches or masks.
_FASTER = ("residual", "mlp", "base_model")


class Mark:
    """Options of the patch of a module; a process that loads one watches as well.

    moving: Parts of the patched model that were left and whose bits follow the batch.
    """

    def __init__(self, options: Options, moving: tuple[str, ...] = ()) -> None:
        watch()
        self.options, self.moving = options, moving

    def __reduce__(self) -> tuple[type, tuple[Options, tuple[str, ...]]]:
        return Mark, (self.options, self.moving)


@functools.cache
def watch() -> None:
    """Watch every module that is registered from now on."""
    register_module_module_registration_hook(_registered)


def mark(model: torch.nn.Module, options: Options, moving: tuple[Left, ...]) -> None:
    """Watch the modules that are added to a model, or replaced in it."""
    shared = Mark(options, tuple(f"{left.name or 'the model'} ({left.part})" for left in moving))
    for module in model.modules():
        vars(module)[_MARK] = shared


def options_of(module: torch.nn.Module) -> Options | None:
    """Return the options of the patch that a module is inside of; None: of none."""
    mark_of_module = vars(module).get(_MARK)
    return None if mark_of_module is None else mark_of_module.options


def clear(module: torch.nn.Module) -> None:
    """Let a module run and be changed again."""
    vars(module).pop(_MARK, None)
    guard = vars(module).pop(_GUARD, None)
    if guard is not None:
        module._forward_pre_hooks.pop(guard, None)


def _registered(parent: torch.nn.Module, name: str, new: torch.nn.Module | None) -> None:
    """Registration hook: guard the parts of a new module that the patch does not know."""
    before = parent._modules.get(name)
    inside = parent if before is None or _MARK in vars(parent) else before
    patched = vars(inside).get(_MARK)
    if patched is None or not isinstance(new, torch.nn.Module) or new is before:
        return
    options = patched.options
    plan = patch_plan.plan(new, options)
    # Without these forwards bytes are the same; the parts inside are guarded.
    needed = [action for action in plan.actions if action.kind not in _FASTER]
    parts = [(action.name, action.module) for action in needed]
    parts += [(attention.name, attention.modules[0]) for attention in plan.attentions]
    chosen = [f"{option}=False" for option in options._fields]
    modules = dict(new.named_modules())
    parts += [(left.name, modules[left.name]) for left in plan.left if _moves(left, chosen)]
    for path, part in parts:
        if kind_of(part) is None and _GUARD not in vars(part) and _MARK not in vars(part):
            refuse = functools.partial(checks.not_patched, f"{name}.{path}" if path else name)
            vars(part)[_GUARD] = part.register_forward_pre_hook(refuse).id


def _moves(left: Left, chosen: list[str]) -> bool:
    return left.moves and left.known not in chosen
