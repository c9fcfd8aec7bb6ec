"""``ck.nn``: modules to put where ``torch.nn`` has them, each calling one op of this library.

They derive from torch's classes: constructor arguments, parameters, initialisation, state-dict
keys, ``isinstance`` and pickling are torch's.  Options of ours are keyword-only and come last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import nn

from .errors import ArgumentTypeError, ArgumentValueError, ShapeError, expected, one_of
from .gemm import api as gemm
from .gemm.config import ORDERS
from .logp import api as logp
from .norm import api as norm
from .rowwise import api as rowwise
from .runtime import checking
from .runtime.torch_ops import own_result

if TYPE_CHECKING:
    from torch.types import Device

__all__ = ["Embedding", "LayerNorm", "Linear", "LinearLogp", "RMSNorm"]

#: Options of LinearLogp beside a Linear's -> default.
_HEAD_OPTIONS = {
    "temperature": 1.0,
    "softcap": 0.0,
    "ignore_index": -100,
    "vocab_start": 0,
    "vocab_size": None,
}

#: Options of torch's Embedding that ck.embedding does not have -> (value where unset, why not).
_EMBEDDING_OPTIONS = {
    "max_norm": (None, "rows that other tokens name would be scaled in place before the look-up"),
    "scale_grad_by_freq": (False, "it divides by the tokens of one micro-batch"),
    "sparse": (False, "sparse gradients are added in no fixed order"),
}


class _Module(nn.Module):
    """Options that all modules have, beside the class of torch."""

    main_grad: bool

    def _set_main_grad(self, main_grad: bool) -> None:
        if not isinstance(main_grad, bool):
            got = type(main_grad).__name__
            raise ArgumentTypeError(expected("main_grad", "True or False", got))
        self.main_grad = main_grad

    def _destination(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """The ``main_grad`` of a parameter, if the module uses it and a backward may follow."""
        if not (self.main_grad and torch.is_grad_enabled()):
            return None
        return getattr(parameter, "main_grad", None)

    def extra_repr(self) -> str:
        """The arguments of torch's class, and those options of ours that are not the default."""
        return super().extra_repr() + ", main_grad=False" * (not self.main_grad)


class Linear(_Module, nn.Linear):
    """``torch.nn.Linear`` by `cute_kernels.linear`.

    Args:
        in_features, out_features, bias, device, dtype: As in ``torch.nn.Linear``.
        order: As in `cute_kernels.linear`.
        main_grad: Whether the gradient of the weight is added to ``weight.main_grad`` (fp32, its
            shape) where the parameter has one, as in `cute_kernels.linear`.  It is looked up at
            each call.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong; the message names it.

    Example:
        >>> ck.nn.Linear(64, 32)(torch.randn(4, 64)).shape
        torch.Size([4, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        order: str = "chain",
        main_grad: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        if order not in ORDERS:
            raise ArgumentValueError(one_of("order", ORDERS, order))
        self.order = order
        self._set_main_grad(main_grad)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """y = input weightᵀ + bias; errors and guarantees are those of `cute_kernels.linear`."""
        into = self._destination(self.weight)
        return gemm.linear(input, self.weight, self.bias, order=self.order, main_grad=into)

    def extra_repr(self) -> str:
        """The arguments of torch's class, the order, and options that are not the default."""
        return f"{super().extra_repr()}, order={self.order!r}"


class LinearLogp(Linear):
    """An LM head that returns log-probabilities of targets, by `cute_kernels.linear_logp`.

    Parameters and state-dict keys are those of ``torch.nn.Linear(in_features, out_features)``, so
    that it loads the weights of an ``lm_head``, and its weight can be tied to an embedding's.

    Args:
        in_features, out_features, bias, device, dtype: As in ``torch.nn.Linear``; out_features is
            the vocabulary, or the part of it that this rank has.
        order: As in `cute_kernels.linear_logp`.
        temperature, softcap, ignore_index, vocab_start, vocab_size: As in
            `cute_kernels.linear_logp`.
        main_grad: As in `Linear`.

    Raises:
        ArgumentTypeError, ArgumentValueError: ``order`` or ``main_grad`` is wrong; the message
            names it.  Other options are checked by the op, at each call.

    Example:
        >>> ck.nn.LinearLogp(64, 97)(torch.randn(4, 64), torch.randint(97, (4,))).shape
        torch.Size([4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        order: str = "chain",
        temperature: float = 1.0,
        softcap: float = 0.0,
        ignore_index: int = -100,
        vocab_start: int = 0,
        vocab_size: int | None = None,
        main_grad: bool = True,
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, order=order, main_grad=main_grad
        )
        self.temperature = temperature
        self.softcap = softcap
        self.ignore_index = ignore_index
        self.vocab_start = vocab_start
        self.vocab_size = vocab_size

    @overload
    def forward(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor,
        *,
        temperature: float | torch.Tensor | None = ...,
        return_entropy: Literal[False] = ...,
        group: object | None = ...,
        verify: bool | Literal["all"] = ...,
    ) -> torch.Tensor: ...

    @overload
    def forward(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor,
        *,
        temperature: float | torch.Tensor | None = ...,
        return_entropy: Literal[True],
        group: object | None = ...,
        verify: bool | Literal["all"] = ...,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self,
        hidden: torch.Tensor,
        target: torch.Tensor,
        *,
        temperature: float | torch.Tensor | None = None,
        return_entropy: bool = False,
        group: object | None = None,
        verify: bool | Literal["all"] = True,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """log p(target), fp32, shaped like ``target``; with ``return_entropy`` also the entropy.

        Args:
            hidden, target, return_entropy, group, verify: As in `cute_kernels.linear_logp`.
            temperature: For this call, in place of the module's; None: the module's.

        Guarantees, Raises: as `cute_kernels.linear_logp`.
        """
        return logp.linear_logp(
            hidden,
            self.weight,
            target,
            self.bias,
            order=self.order,
            temperature=self.temperature if temperature is None else temperature,
            softcap=self.softcap,
            ignore_index=self.ignore_index,
            return_entropy=return_entropy,
            group=group,
            vocab_start=self.vocab_start,
            vocab_size=self.vocab_size,
            main_grad=self._destination(self.weight),
            verify=verify,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden weightᵀ + bias by `cute_kernels.linear`, before temperature and softcap."""
        return super().forward(hidden)

    def extra_repr(self) -> str:
        """The arguments of torch's class, the order, and options that are not the default."""
        values = ((name, getattr(self, name), unset) for name, unset in _HEAD_OPTIONS.items())
        changed = (f", {name}={value!r}" for name, value, unset in values if value != unset)
        return super().extra_repr() + "".join(changed)


class _Norm(_Module):
    """A norm over the last dimensions, ``normalized_shape``, taken as one row."""

    normalized_shape: tuple[int, ...]

    def _run(
        self, op: Callable, name: str, x: torch.Tensor, residual: torch.Tensor | None, **options
    ):
        """Run an op of rows; its results, one or two, have the shape of ``x``.

        name: of ``x`` in errors.  options: of the op beside the weight's and the residual.
        """
        out = op(
            self._row(name, x),
            self._vector(self.weight),
            residual=None if residual is None else self._row("residual", residual),
            main_grad=self._vector_destination("main_grad", self.weight),
            **options,
        )
        if len(self.normalized_shape) == 1:
            return out
        if residual is None:
            return own_result(out.view(x.shape))
        return own_result(out[0].view(x.shape)), own_result(out[1].view(x.shape))

    def _row(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``x`` with its normalised dimensions as one."""
        checking.tensor(name, x)
        shape, count = self.normalized_shape, len(self.normalized_shape)
        if tuple(x.shape[-count:]) != shape:
            want = f"last dimensions {list(shape)}, the normalized_shape"
            raise ShapeError(expected(name, want, list(x.shape)))
        return x.flatten(-count)

    def _vector(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """A parameter as [D]."""
        return None if parameter is None else parameter.flatten()

    def _vector_destination(self, name: str, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """The ``main_grad`` of a parameter as [D], in its own memory."""
        into = self._destination(parameter)
        if into is None or parameter is None or parameter.dim() == 1:
            return into
        checking.tensor(name, into)
        if into.shape != parameter.shape or not into.is_contiguous():
            want = f"contiguous, of shape {list(parameter.shape)}"
            got = f"shape {list(into.shape)}, strides {into.stride()}"
            raise ShapeError(expected(name, want, got))
        return into.view(-1)


class RMSNorm(_Norm, nn.RMSNorm):
    """``torch.nn.RMSNorm`` by `cute_kernels.rms_norm`.

    Args:
        normalized_shape, elementwise_affine, device, dtype: As in ``torch.nn.RMSNorm``.  Several
            normalised dimensions are taken as one, in row-major order.
        eps: As in ``torch.nn.RMSNorm``: None is the eps of fp32 (2^-23), also for bf16 and fp16,
            as torch computes those in fp32 and takes its eps.
        main_grad: Whether the gradient of the weight is added to ``weight.main_grad`` (fp32, its
            shape) where the parameter has one, as in `cute_kernels.rms_norm`.

    Raises:
        ArgumentTypeError: ``main_grad`` is no bool.  ``eps`` is checked by the op, at each call.

    Example:
        >>> ck.nn.RMSNorm(64)(torch.randn(4, 64)).shape
        torch.Size([4, 64])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        main_grad: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._set_main_grad(main_grad)

    @overload
    def forward(self, x: torch.Tensor, *, residual: None = ...) -> torch.Tensor: ...

    @overload
    def forward(
        self, x: torch.Tensor, *, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The normalised rows of ``x``; with a residual (y, x + residual).

        Errors and guarantees are those of `cute_kernels.rms_norm`, whose rows are the normalised
        dimensions.
        """
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return self._run(norm.rms_norm, "x", x, residual, eps=eps)


class LayerNorm(_Norm, nn.LayerNorm):
    """``torch.nn.LayerNorm`` by `cute_kernels.layer_norm`.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: As in
            ``torch.nn.LayerNorm``.  Several normalised dimensions are taken as one, in row-major
            order.
        main_grad: Whether the gradients of weight and bias are added to their ``main_grad`` (fp32,
            their shape) where the parameters have one, as in `cute_kernels.layer_norm`.

    Raises:
        ArgumentTypeError: ``main_grad`` is no bool.  ``eps`` is checked by the op, at each call.

    Example:
        >>> ck.nn.LayerNorm(64)(torch.randn(4, 64)).shape
        torch.Size([4, 64])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        main_grad: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._set_main_grad(main_grad)

    @overload
    def forward(self, input: torch.Tensor, *, residual: None = ...) -> torch.Tensor: ...

    @overload
    def forward(
        self, input: torch.Tensor, *, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def forward(
        self, input: torch.Tensor, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The normalised rows of ``input``; with a residual (y, input + residual).

        Errors and guarantees are those of `cute_kernels.layer_norm`, whose rows are the normalised
        dimensions.
        """
        bias, into = self.bias, self._vector_destination("bias_main_grad", self.bias)
        options = {"bias": self._vector(bias), "eps": self.eps, "bias_main_grad": into}
        return self._run(norm.layer_norm, "input", input, residual, **options)


class Embedding(_Module, nn.Embedding):
    """``torch.nn.Embedding`` by `cute_kernels.embedding`.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: As in ``torch.nn.Embedding``.
        max_norm: None.  Scaling rows in place makes a look-up depend on the tokens beside it.
        norm_type: The norm of ``max_norm``; without it it means nothing.
        scale_grad_by_freq: False.  A gradient divided by the counts of its micro-batch depends on
            where the tokens are cut.
        sparse: False.  The entries of sparse gradients are added in no fixed order.
        main_grad: Whether the gradient of the weight is added to ``weight.main_grad`` (fp32, its
            shape) where the parameter has one, as in `cute_kernels.embedding`.

    Raises:
        ArgumentTypeError, ArgumentValueError: an option is wrong or not supported; the message
            names it.  An option that is set on the module later is refused at the next call.

    Example:
        >>> ck.nn.Embedding(97, 64)(torch.tensor([3, 5])).shape
        torch.Size([2, 64])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        main_grad: bool = True,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            sparse, _weight, _freeze, device, dtype,
        )  # fmt: skip
        self._set_main_grad(main_grad)
        self._check_options()

    def _check_options(self) -> None:
        for name, (unset, why) in _EMBEDDING_OPTIONS.items():
            value = getattr(self, name)
            if value != unset:
                raise ArgumentValueError(expected(name, f"{unset} ({why})", repr(value)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """weight[input]; errors and guarantees are those of `cute_kernels.embedding`."""
        self._check_options()
        into = self._destination(self.weight)
        return rowwise.embedding(input, self.weight, padding_idx=self.padding_idx, main_grad=into)


#: Class -> the name that `model.patch` has for what its forward computes.
_KINDS = {
    Linear: "linear",
    LinearLogp: "head",
    RMSNorm: "rms_norm",
    LayerNorm: "layer_norm",
    Embedding: "embedding",
}


def kind_of(module: nn.Module) -> str | None:
    """Name that `model.patch` has for the op of a module of this file; None for other modules.

    A subclass with a forward of its own is of none.
    """
    forward = inspect.getattr_static(type(module), "forward", None)  # TorchScript's has a __get__
    return next((kind for cls, kind in _KINDS.items() if cls.forward is forward), None)
