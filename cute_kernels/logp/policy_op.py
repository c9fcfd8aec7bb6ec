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
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace

import torch

from .. import contracts
from ..cpu.ieee import ieee_on
from ..runtime import dispatch, plan_cache
from ..runtime.dispatch import plan_launches
from ..runtime.operands import flat_rows
from ..runtime.plan_cache import Plan
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import checks, config, op
from .chunks import Needs, Pass
from .policy_checks import GIVEN, Choices, Numbers, PolicyProblem
from .policy_losses import LOSSES, ordered_sum, weights_of
from .policy_sweep import TokenInputs, TokenLoss, TokenTerms, sweep
from .tensors import Head

#: Arguments of the op without a gradient: all but hidden, weight and bias.
_OTHERS = 21

contracts.register(
    contracts.Contract(
        "linear_policy_loss",
        config.KEPT["linear_policy_loss"],
        config.policy_plan,
        functools.partial(dispatch.backend, "logp_states"),
    )
)


#: The function of the user's whose call runs now, for which the op's arguments have no room.
_function: ContextVar[Callable[..., torch.Tensor]] = ContextVar("function")


@contextlib.contextmanager
def _calling(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    token = _function.set(function)
    try:
        yield
    finally:
        _function.reset(token)


def _loss_of(choices: Choices, numbers: Numbers, given: dict[str, torch.Tensor]) -> TokenLoss:
    """The loss of an op's arguments."""
    row = LOSSES.get(choices.loss)
    if row is None:
        function, options = _function.get(), {}
        takes = tuple(name for name in given if name != "token_weights")
    else:
        values = ((key, getattr(numbers, key)) for key in row.options)
        options = {key: None if value < 0 else value for key, value in values}
        function = functools.partial(row.function, **options)
        takes = ("advantages",) * row.advantages
        takes += ("old_logp",) * (row.old_logp and "old_logp" in given)
    weights = numbers.kl_weight, numbers.entropy_weight
    return TokenLoss(function, row, options, takes, choices.kl, *weights)


def _run(
    launches, hidden, weight, bias, target, temperatures, cu_seqlens, divisor, advantages, old_logp,
    reference_logp, token_weights, tensors, names, temperature, vocab, ignore_index, softcap, order,
    choices, numbers, entropy, memory, drops, needs,
):  # fmt: skip
    wanted, choices, numbers = Needs(*needs), Choices(*choices), Numbers(*numbers)
    if target.numel() == 0:
        # Sums of nothing are 0.
        known = _known(choices.loss, old_logp, reference_logp, entropy)
        return tuple(t.zero_() for t in _empty_results(hidden, weight, bias, target, known, wanted))
    per_token = advantages, old_logp, reference_logp, token_weights, *tensors
    with ieee_on(hidden):
        rows = op.rows_of(target, temperatures, temperature, ignore_index, vocab)
        counted = target != ignore_index
        divisor = numbers.divisor or None if divisor is None else divisor
        weigh = functools.partial(
            weights_of, counted, max_length=numbers.max_length, scale=numbers.loss_scale,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        of_loss = of_entropy = weigh(reduction=choices.reduction, divisor=divisor)
        if choices.entropy_reduction:
            of_entropy = weigh(reduction=choices.entropy_reduction, divisor=None)
        named = zip((*GIVEN, *names), per_token, strict=True)
        given = {name: t.reshape(-1).float() for name, t in named if t is not None}
        head = Head(weight, bias, 0, vocab, softcap, order)
        logp, entropies, terms, gradients = sweep(
            Pass(launches, flat_rows(hidden, "logp_states"), head, rows),
            _loss_of(choices, numbers, given),
            TokenInputs(given, of_loss, of_entropy),
            entropy,
            wanted,
            memory,
        )
        sums = _sums(terms, entropies, counted.reshape(-1), (of_loss, of_entropy), numbers)
    logp = logp.view(target.shape)
    entropies = logp.new_empty(0) if entropies is None else entropies.view(target.shape)
    return (sums[0], logp, entropies, *sums[1:], *op.as_results(gradients, hidden))


def _plan(*args) -> Plan:
    """Plan of the op; not kept for a function, whose gradient may be one of the entropy or not."""
    named = Choices(*args[-6]).loss in LOSSES
    return replace(plan_launches(_run)(*args), cacheable=named)


def _sums(
    terms: TokenTerms, entropy: torch.Tensor | None, counted, weights, numbers: Numbers
) -> list[torch.Tensor]:
    """The loss and the metrics: sums over all tokens in one order, in fp64, rounded to fp32."""
    of_loss, of_entropy = (w.double() for w in weights)
    total = policy = ordered_sum(terms.policy.double() * of_loss)
    if numbers.kl_weight:
        total = total + numbers.kl_weight * ordered_sum(terms.kl.double() * of_loss)
    if numbers.entropy_weight:
        total = total - numbers.entropy_weight * ordered_sum(entropy.double() * of_entropy)
    count = counted.sum().clamp(min=1).double()
    means = (
        policy.new_empty(0) if t is None else ordered_sum(t.double()) / count
        for t in (terms.kl, entropy, terms.ratio, terms.clipped)
    )
    return [t.float() for t in (total, policy, *means)]


def _known(loss: str, old_logp, reference_logp, entropy: bool) -> tuple[bool, ...]:
    """Whether a call has each metric, in the order of `PolicyMetrics`; others are empty."""
    clips = loss in LOSSES and LOSSES[loss].clips
    return True, reference_logp is not None, entropy, old_logp is not None, clips


def _empty_results(hidden, weight, bias, target, known: tuple[bool, ...], needs):
    """Uninitialised results."""
    logp, _, entropies = op.empty_results(target, known[2])
    metrics = (logp.new_empty(() if has else 0) for has in known)
    gradients = op.empty_gradients(hidden, weight, bias, needs)
    return (logp.new_empty(()), logp, entropies, *metrics, *gradients)


def _fake(
    hidden, weight, bias, target, temperatures, cu_seqlens, divisor, advantages, old_logp,
    reference_logp, *others,
):  # fmt: skip
    choices, _, entropy, *_, needs = others[-6:]
    known = _known(choices[0], old_logp, reference_logp, entropy)
    return _empty_results(hidden, weight, bias, target, known, needs)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*output[-3:])
    ctx.drops = inputs[-2]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, upstream, *_):
    refuse_double("linear_policy_loss", ": its gradients are made in the forward")
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


define = functools.partial(
    define_op,
    vmap=refuse_vmap(
        "linear_policy_loss",
        "and is_grads_batched=True are not supported; its leading dimensions do the same: "
        "hidden [..., D], target [...]",
    ),
)
linear_policy_loss = define(
    "linear_policy_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? temperatures, Tensor? cu_seqlens, Tensor? divisor, Tensor? advantages, "
    "Tensor? old_logp, Tensor? reference_logp, Tensor? token_weights, Tensor[] tensors, "
    "str[] names, float temperature, int vocab, int ignore_index, float softcap, str order, "
    "str[] choices, float[] numbers, bool entropy, int memory, bool drops, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    plan=_plan,
    fake=_fake,
    setup=_setup,
    backward=_backward,
    autocast_args=(0, 1, 2),
)
scale_gradient = define(
    "scale_gradient(Tensor gradient, Tensor scale) -> Tensor",
    plan=plan_launches(_run_scale),
    fake=lambda gradient, scale: gradient.new_empty(gradient.shape),
)


def call(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    head: checks.Problem,
    problem: PolicyProblem,
    options: checks.Options,
    entropy: bool,
) -> tuple[torch.Tensor, ...]:
    """Call the op; entropy: whether it is asked for."""
    records, function = torch.is_grad_enabled(), problem.function
    needs = [records and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    others = {name: t for name, t in problem.tensors.items() if name not in GIVEN}
    with contextlib.nullcontext() if function is None else _calling(function):
        return linear_policy_loss(
            hidden, weight, bias, target, head.temperatures, problem.cu_seqlens, problem.divisor,
            *map(problem.tensors.get, GIVEN), list(others.values()), list(others),
            head.temperature, head.vocab, options.ignore_index, head.softcap, options.order,
            list(problem.choices), list(problem.numbers), entropy, head.memory, True, needs,
        )  # fmt: skip
