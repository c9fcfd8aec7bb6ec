"""verl's fused head: ``linear_cross_entropy(hidden, weight, labels, temperature)``.

verl calls a function of this form where a config asks for fused kernels with
``fused_kernel_options.impl_backend: triton``; `install` puts ours in its place.  Not run with verl.
"""

from __future__ import annotations

import importlib
import sys

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, expected, one_of
from ..logp import api as logp
from ..runtime import process_groups

#: The module of verl that holds the function.
MODULE = "verl.utils.kernel.linear_cross_entropy"
_NAME = "linear_cross_entropy"
#: Modules that hold the function itself if they were imported first.
_USERS = ("verl.models.mcore.model_forward_fused",)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float | torch.Tensor | None = 1.0,
    reduction: str | None = "none",
    dist_process_group: object | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log p, entropy) of labels, as verl's function does.

    Args:
        hidden: [..., D].
        weight: [V, D]; with a group the rows of this rank, as many on each.
        labels: [...], entries of the whole vocabulary.
        temperature: A number, or a tensor shaped like ``labels``; None: 1.
        reduction: ``"none"``: verl's others are sums in an order that follows the batch.
        dist_process_group: Ranks over which the vocabulary is cut; their order of sums is
            ``"tree"``, one rank's ``"chain"``.
        options: verl's ``impl_backend``, which this function is chosen by.

    Returns:
        fp32, shaped like ``labels``, each: the bytes of ``ck.linear_logp`` with an entropy, which
        has a gradient too.

    Raises:
        ArgumentValueError: another ``reduction``.  ArgumentTypeError: another option.
        Others: as ``ck.linear_logp``.
    """
    if reduction not in (None, "none"):
        raise ArgumentValueError(one_of("reduction", ("none",), reduction))
    if unknown := sorted(options.keys() - {"impl_backend"}):
        raise ArgumentTypeError(expected(unknown[0], "no such option", repr(options[unknown[0]])))
    arguments = {"temperature": 1.0 if temperature is None else temperature}
    if dist_process_group is not None:
        group = process_groups.group_of(dist_process_group, "dist_process_group")
        if group.size() > 1:
            rows = weight.shape[0]
            arguments |= {
                "group": group,
                "order": "tree",
                "vocab_start": group.rank() * rows,
                "vocab_size": group.size() * rows,
            }
    return logp.linear_logp(hidden, weight, labels, return_entropy=True, **arguments)


def install() -> None:
    """Make verl's fused kernels call `linear_cross_entropy` of this module.

    Call it in every worker before its model is made; a second call changes nothing.

    Raises:
        ImportError: verl is not installed.
        ArgumentTypeError: a version of verl without that function.
    """
    module = importlib.import_module(MODULE)
    if not callable(getattr(module, _NAME, None)):
        raise ArgumentTypeError(expected("verl", f"a version with {MODULE}.{_NAME}", "none"))
    theirs = getattr(module, _NAME)
    setattr(module, _NAME, linear_cross_entropy)
    for name in _USERS:
        user = sys.modules.get(name)
        if user is not None and getattr(user, _NAME, None) is theirs:
            setattr(user, _NAME, linear_cross_entropy)
