"""Tensors of a checkpoint and parameters of the model have to cover each other.

vLLM drops a tensor whose name ends in ".bias" and that its model has no parameter for, and leaves a
parameter that no tensor fills as it was allocated.  Either makes another function of the weights
than the trainer's, so both are refused by name: at the first load, when published weights are
loaded, and the former in every `load_weights`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.overrides import TorchFunctionMode

from ...errors import PatchError, expected

#: Attributes of a model: names that its last load filled, and the check that they are all.
LOADED, CHECK = "cute_kernels_loaded", "cute_kernels_check_filled"
#: Ends of names that transformers ignores as well.
_IGNORED = ("rotary_emb.inv_freq",)
_TIED = "lm_head.weight"


class _Uses(TorchFunctionMode):
    """Names of the tensors that no function of torch has been given."""

    def __init__(self) -> None:
        super().__init__()
        self.unused: dict[str, None] = {}
        self._by_id: dict[int, tuple[weakref.ref, str]] = {}

    def watch(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pairs; a tensor is unused until it is an argument."""
        for name, tensor in weights:
            self.unused[name] = None
            self._by_id[id(tensor)] = weakref.ref(tensor), name
            yield name, tensor

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for value in args:
            reference, name = self._by_id.get(id(value), (None, ""))
            if reference is not None and reference() is value:
                self.unused.pop(name, None)
                del self._by_id[id(value)]
        return func(*args, **(kwargs or {}))


def watch(model: torch.nn.Module) -> None:
    """Wrap ``load_weights`` of a model, which vLLM has built and not yet loaded."""
    load = model.load_weights

    @functools.wraps(load)
    def load_weights(weights, *args, **kwargs):
        uses = _Uses()
        with uses:
            loaded = load(uses.watch(weights), *args, **kwargs)
        # A copy: vLLM adds to the set the parameters that it does not ask for.
        setattr(model, LOADED, None if loaded is None else frozenset(loaded))
        is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
        ignored = (*_IGNORED, _TIED) if is_tied else _IGNORED
        dropped = [name for name in uses.unused if not name.endswith(ignored)]
        _refuse(model, "a parameter for each tensor of the checkpoint in", dropped)
        return loaded

    model.load_weights = load_weights
    setattr(model, CHECK, functools.partial(check_filled, model))


def check_filled(model: torch.nn.Module) -> None:
    """Refuse a model of which the last load, of a whole checkpoint, left a parameter as it was.

    Raises:
        PatchError: the message names the parameter.
    """
    loaded = getattr(model, LOADED, None)
    if loaded is not None:
        plain = {_plain(name) for name in loaded}
        names = (name for name, _ in model.named_parameters())
        unfilled = [name for name in names if _plain(name) not in plain]
        _refuse(model, "a tensor of the checkpoint for each parameter of", unfilled)


def _plain(name: str) -> str:
    """Name of a parameter without the module that some releases leave out of names of experts."""
    return name.replace(".routed_experts.", ".")


def _refuse(model: torch.nn.Module, want: str, names: list[str]) -> None:
    if names:
        want = f"{want} vLLM's {type(model).__name__}"
        raise PatchError(expected("model", want, f"none for {first_of(names)}"))


def first_of(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]}, and {len(names) - 1} more"
