"""``ck.batch_invariant``: torch's own ops with bits that do not follow the batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from . import checks, mode, overrides
from .mode import State


@contextlib.contextmanager
def batch_invariant(*, strict: bool = False) -> Iterator[None]:
    """Context in which ops of torch that ours can replace have the bits of ours.

    For code that cannot be patched: products, softmax, norms, sums and means, activations,
    attention and the gradient of embeddings, called as functions of torch, by modules, or by C++
    code of torch.  docs/batch_invariant.md lists them, what of each is covered, and the ops that
    are refused.  An op that is not covered is torch's own, with torch's bits.

    Args:
        strict: Whether an op whose bits are known to follow the batch, and that is not covered, is
            refused where it is called.

    Guarantees:
        Each covered op keeps what the op of ours keeps that stands in for it: ``batch_invariant``
        for rows and their gradients.  No guarantee is made for an op that is in neither list.

    Raises:
        ArgumentTypeError: ``strict`` is not a bool.
        BatchVariantError: with ``strict``, at the call of such an op; it names the op, why, and
            what to do instead.
        UnsupportedTransformError: it is entered inside a graph of ``torch.compile``; or in it,
            what the op of ours refuses: double backward of some, forward-mode differentiation.

    It holds for the thread that enters it, and for the backward passes that this thread starts.  A
    thread that is started inside enters it for itself.  Contexts nest; leaving one brings back what
    was before, after an exception too.  A gradient of an op that was called inside is ours wherever
    backward is called.

    float64, complex and integer tensors, and sparse and nested ones, are torch's.  Integers add
    without rounding; of the others, ``strict`` refuses float64 and complex numbers where the op is
    covered for smaller ones.

    Example:
        >>> x, weight = torch.randn(64, 128), torch.randn(128, 96)
        >>> with ck.batch_invariant():
        ...     torch.equal((x @ weight)[:1], x[:1] @ weight)
        True
    """
    checks.entering(strict)
    before = mode.state()
    _enter(State(True, strict))
    try:
        yield
    finally:
        mode.set_state(before)


def enable_batch_invariant(*, strict: bool = False) -> None:
    """Turn `batch_invariant` on for the calling thread, until `disable_batch_invariant`.

    Args, Guarantees, Raises: as `batch_invariant`.

    Example:
        >>> ck.enable_batch_invariant()
        >>> y = torch.randn(4, 64) @ torch.randn(64, 64)
        >>> ck.disable_batch_invariant()
    """
    checks.entering(strict)
    _enter(State(True, strict))


def disable_batch_invariant() -> None:
    """Turn off what `enable_batch_invariant` turned on; inside a context, until that is left.

    Raises:
        UnsupportedTransformError: it is called inside a graph of ``torch.compile``.

    Example:
        >>> ck.enable_batch_invariant()
        >>> ck.disable_batch_invariant()
    """
    checks.entering(False)
    mode.set_state(State(False, False))


def _enter(new: State) -> None:
    overrides.install(strict=new.strict)
    mode.set_state(new)
