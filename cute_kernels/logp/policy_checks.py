"""Arguments of ``linear_policy_loss`` -> a frozen problem, or one exception that names one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, DtypeError, ShapeError, expected, one_of
from ..runtime import checking
from . import checks, policy_losses
from .policy_losses import LOSSES, PolicyLossRow

#: Losses that are known, and that no sweep over tokens can make -> why.
_OF_SEQUENCES = {
    name: f"{name}'s ratio is of a whole sequence, whose log-probs come first: linear_logp and a "
    "loss of your own, or the two sweeps of docs/policy_loss.md"
    for name in ("gspo", "gspo_token", "gmpo", "luspo", "vespo")
}
_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64, *checks.DTYPES)
_DETACH = ": detach it"
_CLIP, _KL = "clip_low= and clip_high=", "kl_weight="
#: Arguments of the losses of TRL, verl and OpenRLHF, in turn -> those of linear_policy_loss.
OTHER_NAMES = {
    "epsilon": _CLIP, "epsilon_low": "clip_low=", "epsilon_high": "clip_high=", "beta": _KL,
    "delta": "max_ratio=", "loss_type": "loss= and reduction=", "entropy_coef": "entropy_weight=",
    "sapo_temperature_pos": "gate_positive=", "sapo_temperature_neg": "gate_negative=",
    "max_completion_length": "max_length=", "num_items_in_batch": "divisor=",
    "importance_sampling_ratio": "token_weights=", "completion_mask": "mask=",
    "old_per_token_logps": "old_logp=", "ref_per_token_logps": "reference_logp=",
    "clip_ratio": _CLIP, "clip_ratio_low": "clip_low=", "clip_ratio_high": "clip_high=",
    "clip_ratio_c": "max_ratio=", "cliprange": _CLIP, "cliprange_low": "clip_low=",
    "cliprange_high": "clip_high=", "clip_range": _CLIP, "kl_coef": _KL, "kl_loss_coef": _KL,
    "kl_loss_type": "kl=", "entropy_coeff": "entropy_weight=", "loss_agg_mode": "reduction=",
    "response_mask": "mask=", "loss_mask": "mask=", "old_log_prob": "old_logp=",
    "ref_log_prob": "reference_logp=", "rollout_is_weights": "token_weights=",
    "eps_clip": _CLIP, "eps_clip_low_high": _CLIP, "clip_eps": _CLIP, "clip_eps_low": "clip_low=",
    "clip_eps_high": "clip_high=", "dual_clip": "max_ratio=", "init_kl_coef": _KL,
    "kl_estimator": "kl=", "entropy_loss_coef": "entropy_weight=", "old_log_probs": "old_logp=",
    "action_mask": "mask=", "attention_mask": "mask=",
}  # fmt: skip
#: Names of tensors that a user's function gets besides its own.
GIVEN = ("advantages", "old_logp", "reference_logp", "token_weights")


class Choices(NamedTuple):
    """Names that a loss is made of: as they came, or checked.

    loss: A row of the table; or a function, which is ``"function"`` where checked.
    entropy_reduction: None is empty where checked: the entropy has the weights of the loss.
    """

    loss: object
    kl: str
    reduction: str | None
    entropy_reduction: str | None


class Numbers(NamedTuple):
    """Numbers of a loss: as they came, or checked, where None is 0 (divisor) or -1 (options)."""

    kl_weight: float
    entropy_weight: float
    loss_scale: float
    max_length: float | None
    divisor: float | torch.Tensor | None
    clip_low: float | None
    clip_high: float | None
    max_ratio: float | None
    gate_positive: float | None
    gate_negative: float | None


class PolicyProblem(NamedTuple):
    """A checked loss: what `policy_op` is called with besides the head and its tokens.

    function: The user's, or None for a row of the table.  tensors: by name, of the shape of target.
    """

    function: Callable[..., torch.Tensor] | None
    tensors: Mapping[str, torch.Tensor]
    choices: Choices
    numbers: Numbers
    divisor: torch.Tensor | None
    cu_seqlens: torch.Tensor | None


def counted_target(target: object, mask: object, ignore_index: object) -> torch.Tensor:
    """``target`` with ``ignore_index`` where the mask is 0."""
    checking.tensor("target", target)
    checks.ignored(ignore_index)
    if mask is None:
        return target
    checking.tensor("mask", mask)
    checking.dtype("mask", mask.dtype, _MASKS)
    checking.shape("mask", mask, target.shape, "that of target")
    checking.same_device("mask", mask, "target", target)
    checking.integers("target", target)
    want = "values of 0 and 1 (token_weights= multiplies the losses of tokens)"
    checking.values("mask", mask, lambda t: (t == 0) | (t == 1), want)
    # An int32 may not hold ignore_index.
    return torch.where(mask != 0, target.to(torch.int64), ignore_index)


def policy_loss(
    target: torch.Tensor,
    ignore_index: int,
    given: Mapping[str, object],
    extra: object,
    cu_seqlens: object,
    choices: Choices,
    numbers: Numbers,
) -> PolicyProblem:
    """The problem of a loss.

    given: The tensors of `GIVEN`, or None each.  extra: ``tensors`` of the user's.
    """
    _, kl, reduction, of_entropy = choices
    row, function = _loss(choices.loss)
    _cu_seqlens(cu_seqlens, target)
    tensors = _tensors(given, extra, row, kl)
    tensors = {name: _per_token(name, t, target, cu_seqlens) for name, t in tensors.items()}
    if function is not None:
        if torch.compiler.is_compiling():  # a graph cannot hold it
            want = "the name of a loss in a graph of torch.compile (a function runs outside of it)"
            _refuse("loss", want, "a function")
        _takes(function, tensors)
    if reduction is None:
        reduction = row.reduction if row is not None else "token_mean"
    used = {"reduction": reduction}
    if of_entropy is not None:
        used["entropy_reduction"] = of_entropy
    for name, value in used.items():
        if value not in policy_losses.REDUCTIONS:
            raise ArgumentValueError(one_of(name, policy_losses.REDUCTIONS, value))
    used = set(used.values())
    if used & {"sequence_mean", "constant"} and target.dim() < 2 and cu_seqlens is None:
        want = (
            "target [..., L], whose rows are sequences, or cu_seqlens of packed ones, as the "
            f"reduction is {reduction!r}"
        )
        raise ShapeError(expected("target", want, list(target.shape)))
    max_length = _max_length(numbers.max_length, used)
    kl_weight = _finite("kl_weight", numbers.kl_weight)
    if not isinstance(kl, str) or kl not in policy_losses.KL:
        raise ArgumentValueError(one_of("kl", policy_losses.KL, kl))
    if kl_weight and "reference_logp" not in tensors:
        _refuse("reference_logp", "log-probs of the reference, as kl_weight is not 0", "None")
    options = _options_of(row, numbers)
    divisor, number = _divisor(numbers.divisor, target, ignore_index)
    weights = (_finite(name, getattr(numbers, name)) for name in ("entropy_weight", "loss_scale"))
    numbers = Numbers(kl_weight, *weights, max_length, number, *options.values())
    name = "function" if row is None else row.name
    choices = Choices(name, kl, reduction, of_entropy or "")
    return PolicyProblem(function, tensors, choices, numbers, divisor, cu_seqlens)


def _refuse(name: str, want: str, got: object) -> NoReturn:
    raise ArgumentValueError(expected(name, want, got))


def losses(policy: object, logp: torch.Tensor) -> None:
    """Check what a loss function returned for log-probs [tokens]."""
    if not isinstance(policy, torch.Tensor):
        want = "a function that returns a tensor, a loss per token"
        _refuse("loss", want, type(policy).__name__)
    if policy.shape != logp.shape or policy.dtype != logp.dtype:
        want = f"a function that returns {logp.dtype} {list(logp.shape)}, a loss per token"
        _refuse("loss", want, f"{policy.dtype} {list(policy.shape)}")


def some_gradient(term: torch.Tensor, entropy_weight: float) -> None:
    """Refuse a function whose loss has no gradient, where no other term gives one."""
    if not (term.requires_grad or entropy_weight):
        want = "a function of logp or entropy with a gradient, as hidden, weight or bias needs one"
        _refuse("loss", want, "one whose result has none (detached, or made under torch.no_grad())")


def no_other_gradient(policy: object, leaves: Sequence[torch.Tensor | None]) -> None:
    """Refuse a loss that depends on tensors besides ``leaves`` which require a gradient.

    It is differentiated in ``leaves`` alone: parameters that a function reads would get none.
    """
    nodes, seen = [getattr(policy, "grad_fn", None)], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is t for t in leaves):
            want = "a function of tensors without a gradient, besides logp and entropy (detach)"
            _refuse("loss", want, f"a tensor {list(leaf.shape)} that requires a gradient")
        nodes.extend(following for following, _ in node.next_functions)


def _loss(loss: object) -> tuple[PolicyLossRow | None, Callable | None]:
    if callable(loss):
        return None, loss
    if not isinstance(loss, str):
        want = "the name of a loss, or a function (logp, entropy, **tensors) -> loss per token"
        raise ArgumentTypeError(expected("loss", want, type(loss).__name__))
    if loss in _OF_SEQUENCES:
        raise ArgumentValueError(
            expected("loss", "a loss whose tokens' weights are known before their log-probs", loss)
            + f" ({_OF_SEQUENCES[loss]})"
        )
    if loss not in LOSSES:
        raise ArgumentValueError(one_of("loss", LOSSES, loss))
    return LOSSES[loss], None


def _takes(function: Callable, tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that a function can be called with (logp, entropy, **tensors)."""
    given = [name for name in tensors if name != "token_weights"]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of C that has none
        return
    try:
        signature.bind(None, None, **dict.fromkeys(given))
    except TypeError as error:
        want = f"a function of ({', '.join(['logp', 'entropy', *given])})"
        raise ArgumentTypeError(expected("loss", want, f"{signature} ({error})")) from None


def _tensors(given, extra, row: PolicyLossRow | None, kl: object) -> dict[str, object]:
    """Arguments of the loss by name, those that are not None."""
    tensors = {name: t for name, t in given.items() if t is not None}
    extra = {} if extra is None else extra
    if not isinstance(extra, Mapping):
        want = "a mapping of names to tensors shaped like target"
        raise ArgumentTypeError(expected("tensors", want, type(extra).__name__))
    if row is not None:
        loss, has = f"as loss={row.name!r}", "advantages" in tensors
        no_ratio = not row.old_logp and kl != "k3_importance"
        for wrong, name, want, got in (
            (extra, "tensors", f"None, {loss} takes no tensors of yours", sorted(extra)),
            (row.advantages > has, "advantages", f"a tensor, {loss} weights tokens by it", None),
            (has > row.advantages, "advantages", f"None, {loss} has no advantages", "a tensor"),
            (
                no_ratio and "old_logp" in tensors,
                "old_logp", f"None, {loss} has no importance ratio", "a tensor",
            ),
        ):  # fmt: skip
            if wrong:
                _refuse(name, want, got)
    reserved = (*GIVEN, "logp", "entropy")
    for name, value in extra.items():
        if not isinstance(name, str) or name in reserved:
            _refuse("tensors", f"names other than {', '.join(reserved)}", repr(name))
        tensors[name] = value
    return tensors


def _per_token(name: str, t: object, target, cu_seqlens) -> torch.Tensor:
    """``t`` expanded to the shape of target: a value a token, or a sequence."""
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, checks.DTYPES)
    checking.same_device(name, t, "target", target)
    checking.no_gradient(name, t, _DETACH)
    shape = tuple(target.shape)
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    if tuple(t.shape) == shape:
        if sequences == len(target):
            _no_empty_sequence(name, t, cu_seqlens)
        return t
    if sequences is not None and tuple(t.shape) in ((sequences,), (sequences, 1)):
        return t.reshape(-1)[policy_losses.sequence_of(target, cu_seqlens)]
    if len(shape) > 1 and tuple(t.shape) == shape[:-1]:
        return t[..., None].expand(shape)
    if len(shape) > 1 and tuple(t.shape) == (*shape[:-1], 1):
        return t.expand(shape)
    want = f"shape {list(shape)}, that of target, or a value a sequence"
    raise ShapeError(expected(name, want, list(t.shape)))


def _no_empty_sequence(name: str, t: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Refuse [B] of as many tokens as sequences, unless each sequence has one token.

    A read of a GPU waits for it.
    """
    edges = None if torch.compiler.is_compiling() else checking.in_memory(cu_seqlens)
    if edges is None or edges.is_meta or edges.diff().ne(1).any():
        want = "[B, 1], a value a sequence, as target has as many tokens as sequences"
        raise ShapeError(expected(name, want, f"{list(t.shape)}, which may be of either"))


def _cu_seqlens(cu_seqlens: object, target: torch.Tensor) -> None:
    if cu_seqlens is None:
        return
    checking.integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        want = "shape [B + 1], B of at least 1"
        raise ShapeError(expected("cu_seqlens", want, list(cu_seqlens.shape)))
    if target.dim() != 1:
        want = "1 dimension [T], as cu_seqlens cuts packed tokens"
        raise ShapeError(expected("target", want, list(target.shape)))
    checking.same_device("cu_seqlens", cu_seqlens, "target", target)
    if (values := checking.readable(cu_seqlens)) is not None:
        edges = values.tolist()
        if edges[0] or edges[-1] != len(target) or edges != sorted(edges):
            want = f"ascending positions from 0 to {len(target)}, the tokens"
            raise ArgumentValueError(expected("cu_seqlens", want, edges))


def _divisor(
    value: object, target: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor | None, float]:
    """A tensor, or a number: 0 for None."""
    if value is None:
        return None, 0.0
    if not isinstance(value, torch.Tensor):
        return None, _positive("divisor", value)
    checking.tensor("divisor", value)
    if value.numel() != 1:
        want = "a number above 0, or a tensor of one"
        raise ShapeError(expected("divisor", want, list(value.shape)))
    if value.is_complex() or value.dtype is torch.bool:
        raise DtypeError(expected("divisor", "a tensor of one real number", value.dtype))
    checking.same_device("divisor", value, "target", target)
    checking.no_gradient("divisor", value, _DETACH)
    known, tokens = checking.readable(value), checking.readable(target)
    # The count of a batch without tokens is 0, and so is its loss, as on a GPU.
    empty = tokens is not None and not bool((tokens != ignore_index).any())
    if known is not None and not (empty and known.item() == 0):
        _positive("divisor", known.item())
    return value.detach().reshape(()), 0.0


def _max_length(value: object, reductions: set[str]) -> float:
    if "constant" not in reductions:
        if value is not None:
            _refuse("max_length", "None: only reduction='constant' divides by it", value)
        return 1.0
    if value is None:
        want = "the length that reduction='constant' divides by, such as the longest completion"
        _refuse("max_length", want, "None")
    return _positive("max_length", value)


#: Numbers of a loss are fp32: its largest, and the least above 0 that is not subnormal.
_MOST, _LEAST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_ABOVE_0 = "a number above 0, of 2^-126 or more"
#: Option of a loss -> (whether a value is allowed, the values for a reader).
_RANGES = {
    "clip_low": (lambda x: 0 <= x <= 1, "0 to 1 (1: no lower bound)"),
    "clip_high": (lambda x: x >= 0, "0 or more"),
    "max_ratio": (lambda x: x >= 1, "1 or more"),
    "gate_positive": (lambda x: x >= _LEAST, _ABOVE_0),
    "gate_negative": (lambda x: x >= _LEAST, _ABOVE_0),
}


def _options_of(row: PolicyLossRow | None, numbers: Numbers) -> dict[str, float]:
    """The options of a row; -1 for those that it does not have."""
    has = {} if row is None else row.options
    options = {name: has.get(name) for name in _RANGES}
    for name, (allowed, shown) in _RANGES.items():
        value = getattr(numbers, name)
        if value is None:
            continue
        if name not in has:
            which = "a function" if row is None else f"loss={row.name!r}"
            _refuse(name, f"None, as {which} has no such option", value)
        options[name] = _finite(name, value)
        if not allowed(options[name]):
            _refuse(name, shown, value)
    if row is not None and row.function is policy_losses.spo:
        _positive("clip_high", options["clip_high"])
    most = options["max_ratio"]
    if most is not None and most < 1 + options["clip_high"]:
        _refuse("max_ratio", f"at least 1 + clip_high = {1 + options['clip_high']}", most)
    return {name: -1.0 if number is None else number for name, number in options.items()}


def _positive(name: str, value: object) -> float:
    number = _finite(name, value)
    if number < _LEAST:
        _refuse(name, _ABOVE_0, value)
    return number


def _finite(name: str, value: object) -> float:
    number = checking.number(name, value)
    # A comparison: in a graph of dynamic shapes the number may be a symbol.
    if not -_MOST <= number <= _MOST:
        _refuse(name, "a finite number of fp32", value)
    return number
