"""``attn_implementation="cute_kernels"`` for Hugging Face transformers.

    from cute_kernels.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cute_kernels")

Two functions are registered: one that says where each sequence lies in the key buffer and what its
queries see, once per forward pass and kind of mask, and one that attends with it.  Each sequence is
attended at its own positions, so a row has its bits, and a sequence its gradients, under any batch,
padding on either side, packing through ``position_ids``, chunked prefill, and dynamic, sliding and
static caches.  Under ``torch.compile`` what was found is an operand of the graph.

``experts_implementation="cute_kernels"`` is registered too: experts.py.
``token_logps(model, input_ids)`` gives log-probabilities of tokens without logits, and
``policy_loss(model, input_ids, loss=...)`` a loss of them: token_logps.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch

from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DtypeError,
    MissingPackageError,
    expected,
)
from ..runtime import checking
from ..runtime.caching import capturing
from ..schedulers.masks.mask import BlockMask
from ..sparse_attn import api
from . import continuous_batching, experts
from .experts import shard_experts as shard_experts
from .token_logps import policy_loss as policy_loss
from .token_logps import token_logps as token_logps

NAME = "cute_kernels"
#: The name with transformers' former mark of attention over pages.
PAGED = f"paged|{NAME}"
#: The oldest transformers: in older ones `spans` gets other arguments.  pyproject.toml has it too.
OLDEST = (5, 4)

#: Keywords that this attention reads, here or in continuous batching.
_READ = ("cache", "s_aux", "cu_seq_lens_q", "cu_seq_lens_k")
_READ += ("max_length_k", "read_index", "write_index", "block_table")
#: Keywords of transformers' models and trainers that change no attention: what is returned beside
#: it, the loss, a window that the mask has already, lengths that others follow from.
_HARMLESS = ("position_ids", "cache_position", "use_cache", "sliding_window", "deterministic")
_HARMLESS += ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
_HARMLESS += ("num_items_in_batch", "shift_labels", "labels", "ignore_index")
_HARMLESS += ("logits_to_keep", "logits_indices", "logits_processor_args")
_HARMLESS += ("max_length_q", "seq_idx")
#: Elements of a mask that are evaluated together.
_CHUNK = 1 << 24
#: Keys of one block: positions count modulo this.
_BLOCK = 128
#: Attribute of spans: the position ids that `_check_ascent` has looked at with them.
_ASCENDING = "_cute_kernels_ascending"


def why_not() -> str | None:
    """Why the transformers that is imported is not supported; None: it is."""
    import transformers

    numbers = re.findall(r"\d+", transformers.__version__)[:2]
    if tuple(map(int, numbers)) >= OLDEST:
        return None
    want = f"{'.'.join(map(str, OLDEST))} or newer"
    return expected("transformers", want, transformers.__version__)


def register() -> None:
    """Register the name with transformers, for attention and experts; again changes nothing.

    Raises:
        MissingPackageError: transformers is older than 5.4.
    """
    if reason := why_not():
        raise MissingPackageError(reason)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, spans)
    ExpertsInterface.register(NAME, experts.experts)
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # a version without one for expert parallelism
        return
    from .expert_parallel import ExpertParallel

    EPImplementationInterface.register(NAME, ExpertParallel)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: BlockMask | torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention interface of transformers.

    Args:
        query: [B, Hq, T, D]; key: [B, Hkv, S, D]; value: [B, Hkv, S, Dv]; bf16 or fp16, of the head
            sizes of ``block_sparse_attention``: D of 192 with Dv of 128, as DeepSeek's, too.  Under
            autocast all three are cast to its dtype.
        attention_mask: What ``spans`` or ``whole_sequences`` made; a bool tensor
            [B or 1, Hq or 1, T, S] or a ``BlockMask``, whose keys are at the positions of their
            columns; or None.
        scaling, softcap: Of the scores.  dropout: 0.
        cu_seq_lens_q, cu_seq_lens_k: In ``others``, as ``DataCollatorWithFlattening`` gives them to
            FlashAttention: where the sequences of a batch of 1 begin and end.  What the mask allows
            is then cut there.
        s_aux: In ``others``: [Hq], the attention sinks of gpt-oss and its kin.
        cache: In ``others``: the pages of continuous batching (continuous_batching.py).
        others: Those of transformers that change nothing, as ``position_ids``; any other is None.
        is_causal: Without a mask and with T > 1, whether query i sees keys up to i + S - T only;
            None: as ``module.is_causal`` says, True if it says nothing.

    Returns:
        ([B, T, Hq, Dv], None): the weights are never formed.

    Raises:
        ArgumentValueError: dropout, or a keyword that may change the result, as a position bias, an
            indexer's choice of keys, or any name that is not known to be harmless; position ids
            that go down within a sequence: a pack beside a cache or a padding mask;
            sequence lengths with a cache, with another mask, or that differ between q and k;
            ``whole_sequences`` with keys of a cache.
        ArgumentTypeError: a mask of numbers to add.  And what ``block_sparse_attention`` raises.
    """
    if dropout:
        raise ArgumentValueError(expected("dropout", "0 (dropout is not available)", dropout))
    check_keywords(others, _READ)
    if checking.autocast(query.device):
        # Tables of fp32 rows make q and k fp32; scaled_dot_product_attention casts them too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if others.get("cache") is not None:
        paged = (query, key, value, others, scaling, softcap or 0.0)
        return continuous_batching.attention(module, *paged), None
    if query.dtype == torch.float32:
        want = "torch.bfloat16 or torch.float16, as when it was patched (after a cast patch again)"
        raise DtypeError(expected("q", want, query.dtype))
    operands = tuple(t.transpose(1, 2) for t in (query, key, value))
    numbers = {"scale": scaling, "softcap": softcap or 0.0, "sinks": others.get("s_aux")}
    mask, lengths = attention_mask, others.get("cu_seq_lens_q")
    if lengths is None and _is_of_whole_sequences(mask):
        if query.shape[2] != key.shape[2]:
            want = f"spans, as there are {key.shape[2]} keys for {query.shape[2]} queries"
            raise ArgumentValueError(expected("attention_mask", want, "whole_sequences()"))
        return api.causal_attention(*operands, window=mask.shape[2], **numbers), None
    if lengths is not None:
        mask = _packed(query.shape, key.shape, mask, lengths, others.get("cu_seq_lens_k"))
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool:
        if torch.compiler.is_compiling():  # spans: keys are at the positions of their columns
            sizes, target = (mask.shape[0], *mask.shape[2:]), api.kv_ranges_device(mask.device)
            ranges = api.seen_columns(mask, target)
            mask = api.kv_ranges(ranges, None, 0, 0, sizes, packed=False, device=target)
        else:
            mask = BlockMask.from_dense(mask)
    if isinstance(mask, torch.Tensor):
        if mask.dtype != torch.int32:
            want = "[B, S] of zeros and ones, a bool tensor [B, 1, T, S] or a BlockMask"
            actual = f"{mask.dtype} {list(mask.shape)} (numbers to add to scores are not available)"
            raise ArgumentTypeError(expected("attention_mask", want, actual))
        if lengths is None:
            _check_ascent(others.get("position_ids"), mask)
        return api.sequence_attention(*operands, mask, **numbers), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and mask is None and query.shape[2] > 1
    return api.block_sparse_attention(*operands, mask, causal=causal, **numbers), None


def check_keywords(others: Mapping[str, object], read: Collection[str]) -> None:
    """Check that keywords of a layer are read, None, or of those that change no result.

    Raises:
        ArgumentValueError: a keyword that may change the result.
    """
    for name, other in others.items():
        if other is not None and name not in read and name not in _HARMLESS:
            want = "None, as this layer has no such argument"
            raise ArgumentValueError(expected(name, want, type(other).__name__))


def whole_sequences(window: int = 0) -> torch.Tensor:
    """Mask for `attention` of a batch without padding, packs and cache, as no span has to say.

    transformers passes on a mask of four dimensions that it is given.

    window: How many keys a query sees, itself included; 0: all up to itself.
    """
    return torch.empty((0, 1, window, 0), dtype=torch.int32, device="cpu")


def _is_of_whole_sequences(mask: object) -> bool:
    """Whether `whole_sequences` made a mask; spans have four numbers, and a mask its columns."""
    is_table = isinstance(mask, torch.Tensor) and mask.dtype == torch.int32
    return is_table and mask.dim() == 4 and mask.shape[0] == mask.shape[3] == 0


def spans(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **others: object,
) -> torch.Tensor | None:
    """Mask interface of transformers: the spans of a mask function, padding, packs and caches.

    A causal mask is never evaluated; any other is, element by element, once per forward pass, and
    each query must see one run of keys: causal, windows, chunks, packs, prefixes.

    Returns:
        int32 [B, 1, T, 4]; see ``sparse_attn.kv_ranges.ranges``.  On the CPU; or on a GPU whose
        kernels read them, if no gradient is asked for: a CUDA graph can then hold a decoding step.
        None in a batch of continuous batching, whose pages need no mask.

    Raises:
        ArgumentValueError: a query whose keys have gaps between them; padding in the middle of a
            sequence; a chunk of chunked attention that is no multiple of 128.
    """
    if not continuous_batching.makes_masks():
        return None
    from transformers.masking_utils import causal_mask_function

    chunk = getattr(others.get("config"), "attention_chunk_size", None)
    if chunk and chunk == others.get("local_size") and chunk % _BLOCK:
        want = f"a multiple of {_BLOCK}, so that bits do not depend on where a prefill is cut"
        raise ArgumentValueError(expected("config.attention_chunk_size", want, chunk))
    target = api.kv_ranges_device(device)
    any_mask = mask_function not in (None, causal_mask_function)
    if target.type != "cpu" and any_mask and attention_mask is None and q_length == kv_length:
        # The mask may be that of a varlen batch.
        target = torch.device("cpu")
    sizes, ranges = (batch_size, q_length, kv_length), None
    if any_mask:
        rule = mask_function, attention_mask, bool(others.get("use_vmap", False)), device
        ranges = _column_ranges(sizes, (q_offset, kv_offset), rule, target)
    packed = target.type == "cpu"
    return api.kv_ranges(
        ranges, attention_mask, q_offset, kv_offset, sizes, packed=packed, device=target
    )


def _column_ranges(sizes: tuple, offsets: tuple, rule: tuple, target: torch.device) -> torch.Tensor:
    """Return the columns each query sees, int32 [B, 1, T, 2], some rows of the mask at a time."""
    from transformers.masking_utils import sdpa_mask

    batch, rows, columns = sizes
    function, padding, use_vmap, device = rule

    def seen_by(start: int, count: int) -> torch.Tensor:
        dense = sdpa_mask(
            batch,
            count,
            columns,
            offsets[0] + start,
            offsets[1],
            function,
            padding,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return api.seen_columns(dense, target)

    # A loop over the rows would tie a compiled graph to their number.
    if torch.compiler.is_compiling() or batch * rows * columns <= _CHUNK:
        return seen_by(0, rows)
    step = max(1, _CHUNK // (batch * columns))
    return torch.cat(
        [seen_by(start, min(step, rows - start)) for start in range(0, rows, step)], dim=2
    )


def _packed(q_shape, k_shape, mask, lengths, of_keys) -> torch.Tensor:
    """Return the spans of a varlen batch whose sequences are given by where they begin and end."""
    if q_shape[2] != k_shape[2]:
        want = f"no cache: {q_shape[2]} keys, as there are queries"
        raise ArgumentValueError(expected("cu_seq_lens_q", want, k_shape[2]))
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.int32:
        want, got = "a mask that this module's spans() made", f"{mask!r:.40} and cu_seq_lens_q"
        raise ArgumentValueError(expected("attention_mask", want, got))
    return api.cut_kv_ranges(mask, lengths, of_keys)


def _check_ascent(position_ids: object, spans: torch.Tensor) -> None:
    """Refuse a pack that transformers did not look for, as there is a cache or a mask.

    Once for each forward pass: the layers share spans and position ids.  A GPU is waited for.
    """
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 2:
        return  # three rows of positions, or a model that hands none on
    if spans.shape[2] == 1 or position_ids.shape[1] != spans.shape[2]:
        return
    if torch.compiler.is_compiling() or type(spans) is not torch.Tensor or capturing():
        return
    if getattr(spans, _ASCENDING, None) is position_ids:
        return
    positions = position_ids.to(spans.device)
    begin, _, first, end = spans[:, 0].unbind(-1)
    real = first < end
    together = real[:, 1:] & real[:, :-1] & (begin[:, 1:] == begin[:, :-1])
    falls = together & (positions[:, 1:] < positions[:, :-1])
    if bool(falls.any()):
        row, token = falls.nonzero()[0].tolist()
        want = "ascending positions (a pack needs use_cache=False and no attention_mask)"
        actual = f"{int(positions[min(row, len(positions) - 1), token + 1])} at token {token + 1}"
        raise ArgumentValueError(expected("position_ids", want, f"{actual} of row {row}"))
    setattr(spans, _ASCENDING, position_ids)
