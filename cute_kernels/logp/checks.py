"""Tensors -> a frozen Problem, or one exception that names the argument.  Works on meta tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import settings
from ..errors import ArgumentValueError, ShapeError, expected, one_of
from ..runtime import checking
from ..runtime import main_grad as destination
from .config import MAX_VOCAB, ORDERS, UNIT

DTYPES = checking.FLOATS
_MAX_SIZE = 2**31 - 1
#: Of a temperature and a softcap: log2(e) / τ, and logits over it, are then normal in fp32.
_LEAST, _MOST, _RANGE = 2.0**-100, 2.0**100, "2^-100 to 2^100"
#: A capped logit has an absolute error of 2^-21 softcap: 1 - 2 / (1 + e^x) cancels near 0.
MOST_SOFTCAP = 1024.0


class Problem(NamedTuple):
    """Rows of a head from ``start`` on, of a vocabulary of ``vocab``, and the tokens' options.

    memory: bytes for logits that a forward keeps.
    """

    tokens: int
    start: int
    vocab: int
    temperature: float
    temperatures: torch.Tensor | None
    softcap: float
    memory: int = 0


class Options(NamedTuple):
    """The arguments that have a default, as they came."""

    temperature: object
    softcap: object
    ignore_index: object
    return_entropy: object
    vocab_size: object
    order: object = "chain"
    vocab_start: object = 0
    main_grad: object = None
    logits_memory: object = None


def linear_logp(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    sharded: bool,
) -> Problem:
    """The problem of one rank's arguments; ``sharded``: whether there is a group."""
    _floats("hidden", hidden)
    _floats("weight", weight)
    checking.rank("weight", weight, 2, "[V, D]")
    rows, width = weight.shape
    if hidden.dim() < 1 or hidden.shape[-1] != width:
        want = f"shape [..., {width}], the D of weight {list(weight.shape)}"
        raise ShapeError(expected("hidden", want, list(hidden.shape)))
    if min(width, rows) < 1:
        raise ShapeError(expected("weight", "at least 1 row and 1 column", list(weight.shape)))
    checking.same_kind("weight", weight, "hidden", hidden)
    checking.supported("linear_logp", hidden.device)
    if bias is not None:
        _floats("bias", bias)
        checking.shape("bias", bias, [rows], "the V of weight")
        checking.same_kind("bias", bias, "hidden", hidden)
    if options.order not in ORDERS:
        raise ArgumentValueError(one_of("order", ORDERS, options.order))
    start, vocab = _vocabulary(rows, options.vocab_start, options.vocab_size, sharded)
    problem = _tokens(target, hidden, "hidden", options, start, vocab)
    problem = problem._replace(memory=_memory(options.logits_memory))
    if options.main_grad is not None:
        destination.check(options.main_grad, weight, hidden, "hidden")
    if not torch.compiler.is_compiling():
        destination.check_values(hidden, weight, bias, options.main_grad, "hidden")
    return problem


def log_probs(logits: torch.Tensor, target: torch.Tensor, options: Options) -> Problem:
    """The problem of ``log_probs(logits[..., V], target[...])``."""
    _floats("logits", logits)
    if logits.dim() < 1 or logits.shape[-1] < 1:
        want = "at least 1 dimension, the last of at least 1"
        raise ShapeError(expected("logits", want, list(logits.shape)))
    checking.supported("log_probs", logits.device)
    _, vocab = _vocabulary(logits.shape[-1], 0, options.vocab_size, False)
    return _tokens(target, logits, "logits", options, 0, vocab)


def _tokens(target, like, name: str, options: Options, start: int, vocab: int) -> Problem:
    """Check one value for each token of ``like`` [..., any]; ``name``: the argument."""
    _target(target, like, name, options.ignore_index, vocab)
    each, number = _temperature(options.temperature, target)
    checking.flag("return_entropy", options.return_entropy)
    return Problem(target.numel(), start, vocab, number, each, _softcap(options.softcap))


def _floats(name: str, t: torch.Tensor) -> None:
    checking.tensor(name, t)
    checking.dtype(name, t.dtype, DTYPES)
    if t.dim() and t.numel() and max(t.shape) > _MAX_SIZE:
        raise ShapeError(expected(name, f"sizes of at most {_MAX_SIZE}", list(t.shape)))


def _vocabulary(rows: int, start: object, size: object, sharded: bool) -> tuple[int, int]:
    start = checking.integer("vocab_start", start, "an int of 0 or more")
    if size is None:
        if sharded:
            want = "the size of the whole vocabulary, as there is a group"
            raise ArgumentValueError(expected("vocab_size", want, "None"))
        size = start + rows
    size = checking.integer("vocab_size", size, "an int, or None")
    if start < 0:
        raise ArgumentValueError(expected("vocab_start", "0 or more", start))
    if start % UNIT:
        want = f"a multiple of {UNIT}, as its neighbours are added together"
        raise ArgumentValueError(expected("vocab_start", want, start))
    if not sharded and start:
        want = "0 without a group: the rows before it would be missing from every sum"
        raise ArgumentValueError(expected("vocab_start", want, start))
    if not 1 <= size <= MAX_VOCAB:
        raise ArgumentValueError(expected("vocab_size", f"1 to {MAX_VOCAB}", size))
    if not sharded and size > rows:
        want = f"at most {rows}, the rows of weight (more of them need a group)"
        raise ArgumentValueError(expected("vocab_size", want, size))
    return start, size


def _target(target, like, name: str, ignore_index, vocab: int) -> None:
    shape = like.shape[:-1]
    checking.integers("target", target)
    checking.shape("target", target, shape, f"that of {name} without its last dimension")
    checking.same_device("target", target, name, like)
    ignored(ignore_index)
    if torch.compiler.is_compiling():  # a size that varies is no part of a text there
        return
    # On a GPU the result is NaN.
    want = f"entries of 0 to {vocab - 1}, or ignore_index ({ignore_index})"
    checking.values(
        "target", target, lambda t: (t == ignore_index) | ((t >= 0) & (t < vocab)), want
    )


def ignored(ignore_index: object) -> None:
    """Check ``ignore_index``."""
    number = checking.integer("ignore_index", ignore_index, "an int")
    if not -(2**63) <= number < 2**63:
        raise ArgumentValueError(expected("ignore_index", "an int of 64 bits", number))


def _temperature(value: object, target: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    if not isinstance(value, torch.Tensor):
        number = checking.number(
            "temperature", value, "a number above 0, or a tensor shaped like target"
        )
        if not _LEAST <= number <= _MOST:
            raise ArgumentValueError(expected("temperature", f"a number of {_RANGE}", value))
        return None, number
    checking.tensor("temperature", value)
    checking.dtype("temperature", value.dtype, DTYPES)
    if value.shape != target.shape:
        want = f"a number, or shape {list(target.shape)}, that of target"
        raise ShapeError(expected("temperature", want, list(value.shape)))
    checking.same_device("temperature", value, "target", target)
    checking.no_gradient("temperature", value)
    in_range = f"values of {_RANGE}"
    checking.values("temperature", value, lambda t: (t >= _LEAST) & (t <= _MOST), in_range)
    return value, 1.0


def _memory(value: object) -> int:
    if value is None:
        return settings.logits_memory()
    number = checking.integer("logits_memory", value, "an int of bytes, or None")
    if not 0 <= number < 2**63:
        raise ArgumentValueError(expected("logits_memory", "0 or more bytes, below 2^63", value))
    return number


def _softcap(value: object) -> float:
    number = checking.number("softcap", value, "a number, 0 for none")
    if number != 0 and not _LEAST <= number <= MOST_SOFTCAP:
        want = "0 (none), or a number of 2^-100 to 1024 (errors are 2^-21 of it)"
        raise ArgumentValueError(expected("softcap", want, value))
    return number
