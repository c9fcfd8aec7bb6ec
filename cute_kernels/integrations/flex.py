"""``flex_attention`` of torch, its arguments and layout, on ``ck.block_sparse_attention``."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected
from ..runtime import checking
from ..runtime.dynamo import untraced
from ..runtime.torch_ops import own_result
from ..schedulers.masks.mask import BlockMask
from ..sparse_attn.api import block_sparse_attention

#: torch's BlockMask -> ours, and the `_state` of torch's that it was made of.
_converted: weakref.WeakKeyDictionary[object, tuple[BlockMask, list]] = weakref.WeakKeyDictionary()
#: Attributes of torch's BlockMask that a conversion reads.
_FIELDS = (
    *("seq_lengths", "BLOCK_SIZE", "kv_num_blocks", "kv_indices"),
    *("full_kv_num_blocks", "full_kv_indices", "mask_mod"),
)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod=None,
    block_mask=None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict | None = None,
    *,
    return_aux: object = None,
    softcap: float = 0.0,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
    schedule: object = "auto",
    deterministic: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, object]:
    """A drop-in for ``torch.nn.attention.flex_attention.flex_attention``, in its argument order.

    Args:
        query: [B, Hq, Sq, D]; key: [B, Hkv, Sk, D]; value: [B, Hkv, Sk, Dv]; as in
            ``block_sparse_attention`` otherwise.  Hkv < Hq only with ``enable_gqa``.
        score_mod: None; a soft cap is ``softcap``.
        block_mask: torch's BlockMask or ours, or None.  The mask_mod of torch's is evaluated in its
            partial blocks and kept as bits; evaluated anew once the BlockMask has another mask_mod
            or other lists, or once what mask_mod captures (closures, defaults, partial arguments,
            attributes of its object) has another value.  A tensor has another value where torch has
            counted a write.  What mask_mod reads of global variables is not seen.
        scale, return_lse: As in ``flex_attention``.
        kernel_options: None or empty: they are options of torch's kernel.
        return_aux: None, or an ``AuxRequest`` without ``max_scores``, which no kernel here keeps.
        softcap, causal, sinks, schedule, deterministic: As in ``block_sparse_attention``.

    Returns:
        [B, Hq, Sq, Dv] with the strides of [B, Sq, Hq, Dv]; with ``return_lse`` also fp32
        [B, Hq, Sq]; with ``return_aux`` an ``AuxOutput``, whose ``lse`` it is if requested.

    Raises:
        ArgumentTypeError: a ``score_mod``, or an argument of another type.  ArgumentValueError:
        ``kernel_options``, ``max_scores``, or ``return_lse`` beside ``return_aux``.  ShapeError:
        GQA without ``enable_gqa``.  And what ``block_sparse_attention`` and
        ``BlockMask.from_flex`` raise.
    """
    _check_options(score_mod, enable_gqa, return_lse, kernel_options, return_aux)
    for name, t in (("query", query), ("key", key), ("value", value)):
        checking.tensor(name, t)
        checking.rank(name, t, 4, "[B, H, S, D]")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if not enable_gqa and q.shape[2] != k.shape[2]:
        want = f"{q.shape[2]} heads like query, or enable_gqa=True"
        raise ShapeError(expected("key", want, k.shape[2]))
    with_lse = return_lse or getattr(return_aux, "lse", False)
    results = block_sparse_attention(
        *(q, k, v, mask_of(block_mask)),
        causal=causal,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        schedule=schedule,
        deterministic=deterministic,
        return_lse=with_lse,
    )
    out, lse = results if with_lse else (results, None)
    out = own_result(out.transpose(1, 2))
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def _check_options(score_mod, enable_gqa, return_lse, kernel_options, return_aux) -> None:
    """Refuse what torch's function takes and this one does not compute."""
    if score_mod is not None:
        want = "None (a score_mod is arbitrary code; softcap= is built in)"
        raise ArgumentTypeError(expected("score_mod", want, type(score_mod).__name__))
    for name, flag in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(flag, bool):
            raise ArgumentTypeError(expected(name, "True or False", repr(flag)))
    if kernel_options is not None and kernel_options != {}:
        want = "None (they are options of torch's kernel)"
        raise ArgumentValueError(expected("kernel_options", want, kernel_options))
    if return_aux is None:
        return
    from torch.nn.attention.flex_attention import AuxRequest

    if not isinstance(return_aux, AuxRequest):
        want = "None or a torch.nn.attention.flex_attention.AuxRequest"
        raise ArgumentTypeError(expected("return_aux", want, type(return_aux).__name__))
    if return_aux.max_scores:
        raise ArgumentValueError(expected("return_aux.max_scores", "False", True))
    if return_lse:
        want = "False beside return_aux, which requests it"
        raise ArgumentValueError(expected("return_lse", want, True))


@untraced
def mask_of(block_mask) -> BlockMask | None:
    """Return our mask for torch's, made once as long as nothing changes; ours and None as is."""
    if block_mask is None or isinstance(block_mask, BlockMask):
        return block_mask
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask

    if not isinstance(block_mask, FlexBlockMask):
        want = (
            "a BlockMask of torch or of cute_kernels, or None "
            "(cute_kernels.BlockMask.from_dense makes one of a bool tensor)"
        )
        raise ArgumentTypeError(expected("block_mask", want, type(block_mask).__name__))
    state = list(_state([getattr(block_mask, name) for name in _FIELDS]))
    mask, converted_state = _converted.get(block_mask, (None, None))
    if converted_state != state:
        mask = BlockMask.from_flex(block_mask)
        _converted[block_mask] = mask, state
    return mask


def _state(value: object, owned: bool = False) -> Iterator[object]:
    """Yield what a value holds, to compare: numbers as they are, all else by identity.

    A tensor also has the number of writes that torch has counted, or its elements where torch
    counts none (inference mode).  ``owned``: by an object, of which the attributes are looked at.
    """
    if isinstance(value, _PLAIN):
        yield type(value), value
        return
    yield _Same(value)
    if isinstance(value, torch.Tensor):
        yield value.tolist() if value.is_inference() else value._version
        return
    inside = owned or not isinstance(value, (*_CALLABLES, *_CONTAINERS))
    for part in _parts(value, owned):
        yield from _state(part, inside)


def _parts(value: object, owned: bool) -> tuple | list:
    """Values that a function, a container or an object holds."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _CONTAINERS):
        return list(value)
    if owned:
        return ()
    if isinstance(value, types.FunctionType):
        empty = types.CellType()
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != empty]
        return *cells, value.__defaults__, value.__kwdefaults__
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    return list(getattr(value, "__dict__", {}).items())


#: Values that are compared as numbers.
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_CONTAINERS = (tuple, list, dict)
_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class _Same:
    """An object, by identity; one that is gone equals none.  Of a container, its type."""

    def __init__(self, value: object):
        try:
            self._get = weakref.ref(value)
        except TypeError:
            kind = type(value)
            self._get = lambda: kind

    def __eq__(self, other: object) -> bool:
        value = self._get()
        return value is not None and isinstance(other, _Same) and other._get() is value

    __hash__ = None
