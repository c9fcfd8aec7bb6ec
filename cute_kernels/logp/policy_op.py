"""The torch ops of linear_policy_loss: schemas, fakes, autograd.

    linear_policy_loss   (loss, log p, entropy, metrics, dhidden, dweight, dbias)
    scale_gradient       a gradient times the upstream scalar, rounded once

The gradients are made in the forward, of the loss as it is returned; the backward multiplies them
by the upstream gradient of the loss, which is one number: in place in the last backward of a graph,
out of place where the graph is kept (retain_graph=True), and where the op was called without
``drops``, the promise that the caller keeps no gradient of the op's results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from .. import contracts
from ..cpu.ieee import ieee_on
from ..errors import UnsupportedTransformError
from ..runtime import dispatch, plan_cache
from ..runtime.dispatch import plan_launches
from ..runtime.operands import flat_rows
from ..runtime.torch_ops import define_op
from . import checks, config, op
from .chunks import Needs
from .policy_checks import PolicyProblem
from .policy_losses import LOSSES, ordered_sum, weights_of
from .policy_sweep import Sweep, TokenInputs, TokenLoss, sweep
from .tensors import Head

#: Options of the losses, in the order of an op's arguments; -1 stands for None.
OPTIONS = ("clip_low", "clip_high", "max_ratio", "gate_positive", "gate_negative")
#: Arguments of the op without a gradient: all but hidden, weight and bias.
_OTHERS = 21
#: Metrics of the op, in the order of its results.
METRICS = ("policy_loss", "kl", "entropy", "ratio", "clip_fraction")

contracts.register(
    contracts.Contract(
        "linear_policy_loss",
        config.KEPT["linear_policy_loss"],
        config.policy_plan,
        functools.partial(dispatch.backend, "logp_states"),
    )
)


class Numbers(NamedTuple):
    """The numbers of a loss; divisor: 0 for the reduction's own."""

    kl_weight: float
    entropy_weight: float
    loss_scale: float
    max_length: float
    divisor: float


#: Functions of users whose calls run now, by the name that stands for them in the op's arguments.
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}
_NUMBER = itertools.count()


@contextlib.contextmanager
def named(function: Callable[..., torch.Tensor]) -> Iterator[str]:
    """Name of a user's function while a call with it runs."""
    name = f"function:{next(_NUMBER)}"
    _FUNCTIONS[name] = function
    try:
        yield name
    finally:
        del _FUNCTIONS[name]


def _loss_of(name: str, options: list[float], tensors: list[str], kl: str, scalars: Numbers):
    """The `TokenLoss` of an op's arguments."""
    row = LOSSES.get(name)
    if row is None:
        takes = tuple(t for t in tensors if t != "token_weights")
        function, chosen = _FUNCTIONS[name], {}
    else:
        chosen = {
            key: None if value < 0 else value
            for key, value in zip(OPTIONS, options, strict=True)
            if key in row.options
        }
        function = functools.partial(row.function, **chosen)
        takes = ("advantages",) * row.advantages
        takes += ("old_logp",) * (row.old_logp and "old_logp" in tensors)
    weights = scalars.kl_weight, scalars.entropy_weight
    return TokenLoss(function, row, chosen, takes, kl, *weights)


def _run(
    hidden, weight, bias, target, temperatures, cu_seqlens, divisor, tensors, names, temperature,
    vocab, ignore_index, softcap, order, loss, options, kl, reduction, entropy_reduction, scalars,
    entropy, memory, drops, needs,
):  # fmt: skip
    wanted, scalars = Needs(*needs), Numbers(*scalars)
    if target.numel() == 0:
        # Sums of nothing are 0.
        known = _known(loss, names, entropy)
        return tuple(t.zero_() for t in _empty_results(hidden, weight, bias, target, known, wanted))
    head = Head(weight, bias, 0, vocab, softcap, order)
    with ieee_on(hidden):
        rows = op.rows_of(target, temperatures, temperature, ignore_index, vocab)
        counted = target != ignore_index
        divisor = scalars.divisor or None if divisor is None else divisor
        weigh = functools.partial(
            weights_of, counted, max_length=scalars.max_length, scale=scalars.loss_scale,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        of_loss = weigh(reduction=reduction, divisor=divisor)
        of_entropy = of_loss
        if entropy_reduction:
            of_entropy = weigh(reduction=entropy_reduction, divisor=None)
        flat = {name: t.reshape(-1).float() for name, t in zip(names, tensors, strict=True)}
        swept = sweep(
            flat_rows(hidden, "logp_states"),
            head,
            rows,
            _loss_of(loss, options, names, kl, scalars),
            TokenInputs(flat, of_loss, of_entropy),
            entropy,
            wanted,
            memory,
        )
        total, metrics = _sums(swept, counted.reshape(-1), (of_loss, of_entropy), scalars)
    logp = swept.logp.view(target.shape)
    entropies = logp.new_empty(0) if swept.entropy is None else swept.entropy.view(target.shape)
    return (total, logp, entropies, *metrics, *op.as_results(swept[3:], hidden))


def _sums(swept: Sweep, counted, weights, scalars: Numbers):
    """(loss, metrics): sums over all tokens in one order, in fp64, rounded to fp32."""
    terms = swept.terms
    of_loss, of_entropy = (w.double() for w in weights)
    policy = ordered_sum(terms.policy.double() * of_loss)
    total = policy
    if scalars.kl_weight:
        total = total + scalars.kl_weight * ordered_sum(terms.kl.double() * of_loss)
    if scalars.entropy_weight:
        bonus = ordered_sum(swept.entropy.double() * of_entropy)
        total = total - scalars.entropy_weight * bonus
    count = counted.sum().clamp(min=1).double()
    means = (
        None if t is None else (ordered_sum(t.double()) / count).float()
        for t in (terms.kl, swept.entropy, terms.ratio, terms.clipped)
    )
    empty = policy.new_empty(0, dtype=torch.float32)
    return total.float(), [
        policy.float(), *(empty.clone() if t is None else t for t in means)
    ]  # fmt: skip


def _known(loss: str, names: list[str], entropy: bool) -> dict[str, bool]:
    """Metric -> whether a call has it; others are empty."""
    row = LOSSES.get(loss)
    return {
        "policy_loss": True,
        "kl": "reference_logp" in names,
        "entropy": entropy,
        "ratio": "old_logp" in names,
        "clip_fraction": row is not None and row.clips,
    }


def _empty_results(hidden, weight, bias, target, known: dict[str, bool], needs):
    """Uninitialised results."""
    logp, _, entropies = op.empty_results(target, known["entropy"])
    metrics = (logp.new_empty(() if known[name] else 0) for name in METRICS)
    gradients = op.empty_gradients(hidden, weight, bias, needs)
    return (logp.new_empty(()), logp, entropies, *metrics, *gradients)


def _fake(
    hidden, weight, bias, target, temperatures, cu_seqlens, divisor, tensors, names, *others
):  # fmt: skip
    entropy, *_, needs = others[-4:]
    known = _known(others[5], names, entropy)
    return _empty_results(hidden, weight, bias, target, known, needs)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output[-3:])
    ctx.drops = inputs[-2]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, upstream, *_):
    if torch.is_grad_enabled():
        raise UnsupportedTransformError(
            "cute_kernels.linear_policy_loss: double backward (create_graph=True) is not "
            "available: its gradients are made in the forward"
        )
    saved = ctx.saved_tensors
    # The graph's last backward gives the saved tensors away; another one reads them again.
    scaled = _scale_in_place if ctx.drops and _is_last(upstream, saved) else scale_gradient
    pairs = zip(saved, ctx.needs_input_grad[:3], strict=True)
    gradients = [scaled(t, upstream) if need else None for t, need in pairs]
    return *gradients, *(None,) * _OTHERS


def _is_last(upstream: torch.Tensor, saved: Sequence[torch.Tensor]) -> bool:
    """Whether the saved tensors are freed after this backward, and nothing else can see them."""
    if upstream.is_meta or plan_cache.intercepted():
        return False
    keeps = torch._C._autograd._get_current_graph_task_keep_graph
    return all(type(t) is torch.Tensor for t in (upstream, *saved)) and not keeps()


def _scale_in_place(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if gradient.numel():
        launch = dispatch.launcher("logp_scale", gradient.device, gradient.dtype)
        launch(gradient, factor, gradient)
    return gradient


def _run_scale(launches, gradient, scale):
    out = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    if out.numel():
        launches("logp_scale", gradient, gradient.contiguous(), scale, out)
    return out


def _vmap_refused(info, in_dims, *args):
    raise UnsupportedTransformError(
        "cute_kernels.linear_policy_loss: torch.func.vmap and is_grads_batched=True are not "
        "supported; its leading dimensions do the same: hidden [..., D], target [...]"
    )


linear_policy_loss = define_op(
    "linear_policy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? temperatures, Tensor? cu_seqlens, Tensor? divisor, Tensor[] tensors, str[] names, "
    "float temperature, int vocab, int ignore_index, float softcap, str order, str loss, "
    "float[] options, str kl, str reduction, str entropy_reduction, float[] numbers, bool entropy, "
    "int memory, bool drops, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    vmap=_vmap_refused,
    autocast_args=(0, 1, 2),
)
scale_gradient = define_op(
    "scale_gradient(Tensor gradient, Tensor scale) -> Tensor",
    plan=plan_launches(_run_scale),
    fake=lambda gradient, scale: gradient.new_empty(gradient.shape),
    vmap=_vmap_refused,
)


def call(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    head: checks.Problem,
    problem: PolicyProblem,
    loss: str,
    options: checks.Options,
    entropy: bool,
) -> tuple[torch.Tensor, ...]:
    """Call the op; ``loss``: the row's name, or that of `named`."""
    records = torch.is_grad_enabled()
    needs = [records and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    divisor = problem.divisor
    of_tensor = isinstance(divisor, torch.Tensor)
    numbers = Numbers(
        problem.kl_weight, problem.entropy_weight, problem.loss_scale, problem.max_length,
        0.0 if of_tensor or divisor is None else divisor,
    )  # fmt: skip
    of_row = (problem.options.get(name) for name in OPTIONS)
    return linear_policy_loss(
        hidden, weight, bias, target, head.temperatures, problem.cu_seqlens,
        divisor if of_tensor else None, list(problem.tensors.values()), list(problem.tensors),
        head.temperature, head.vocab, options.ignore_index, head.softcap, options.order, loss,
        [-1.0 if value is None else value for value in of_row], problem.kl, problem.reduction,
        problem.entropy_reduction, list(numbers), entropy, head.memory,
        True, needs,
    )  # fmt: skip
