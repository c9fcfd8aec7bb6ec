"""The torch ops of linear_logp: schemas, fakes, autograd.

    linear_logp           (log p, log2 Σ 2^y, entropy, sums) of hidden [..., D] and a head [V, D];
                          sums [T', V']: logits before bias and softcap that ``memory`` bytes hold
    linear_logp_backward  (dhidden, dweight, dbias); dweight is added to main_grad if given; the
                          logits of the first T' tokens are not made again
    log_probs             (log p, log2 Σ 2^y, entropy) of logits [..., V]
    log_probs_backward    dlogits

A target is a number of the whole vocabulary; ``ignore_index`` masks it.  The temperature is a
number, or ``temperatures`` shaped like the target.  Entropy is empty unless it was asked for, and
so is a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..cpu.ieee import ieee_on
from ..runtime import dispatch
from ..runtime import main_grad as destination
from ..runtime.dispatch import Implementation, Launches, plan_launches
from ..runtime.operands import flat_rows, padded_width
from ..runtime.torch_ops import define_op, refuse_double, refuse_vmap
from . import chunks, config
from .chunks import Needs, Pass
from .tensors import Head, Logits, Rows, Upstream

#: Entry of `dispatch` -> the op whose contract covers it, launchers on SM90, on Triton, on a CPU.
_LAUNCHERS = {
    "logp_states": ("linear_logp", "launch:states", "triton.launch:states", "cpu:states"),
    "logp_gradients":
        ("linear_logp", "launch:gradients", "triton.launch:gradients", "cpu:gradients"),
    "logp_gradients_kept": (
        "linear_logp", "triton.launch:gradients_of_sums_as_sm90", "triton.launch:gradients_of_sums",
        "cpu:gradients_of_sums",
    ),
    "logp_add_hidden":
        ("linear_logp", "chunks:add_hidden", "chunks:add_hidden", "cpu:add_hidden"),
    "logp_finish": ("linear_logp", "launch:finish", "triton.launch:finish", "exact:finish"),
    "logp_scale":
        ("linear_policy_loss", "triton.launch:scale", "triton.launch:scale", "cpu:scale"),
    "logit_states": ("log_probs", None, "triton.launch:states_of_logits", "cpu:states_of_logits"),
    "logit_gradients":
        ("log_probs", None, "triton.launch:gradients_of_logits", "cpu:gradients_of_logits"),
}  # fmt: skip

#: Modules whose launchers have a planner, ``plan_...``, beside them.
_PLANNING = ("launch:", "chunks:")

for _name, (_contract, *_paths) in _LAUNCHERS.items():
    _implementations = {
        backend: Implementation(
            f"{__package__}.{path}",
            dtypes,
            f"{__package__}.{path.replace(':', ':plan_')}" if path.startswith(_PLANNING) else "",
        )
        for (backend, dtypes), path in zip(dispatch.OF_PRODUCTS.items(), _paths, strict=True)
        if path
    }
    dispatch.register(_name, _implementations, contract=_contract)

for _name, _entry in (("linear_logp", "logp_states"), ("log_probs", "logit_states")):
    dispatch.register_contracts((_name,), config.KEPT[_name], config.contract_facts, _entry)


def rows_of(
    target: torch.Tensor,
    temperatures: torch.Tensor | None,
    temperature: float,
    ignore_index: int,
    vocab: int,
) -> Rows:
    """The tokens of a call, flat."""
    target = target.reshape(-1).to(torch.int64)
    inside = (target >= 0) & (target < vocab)
    column = torch.where(inside, target, config.OUTSIDE)
    column = torch.where(target == ignore_index, config.MASKED, column)
    if temperatures is None:
        # Rounded to fp32 first, as in a tensor: one temperature has one scale.
        with ieee_on(column):
            rounded = torch.tensor(temperature, dtype=torch.float32, device="cpu").item()
            scale = torch.full_like(column, config.LOG2E / rounded, dtype=torch.float32)
    else:
        with ieee_on(temperatures):
            scale = (config.LOG2E / temperatures.reshape(-1).double()).float()
    return Rows(column, scale)


def kept_sums(hidden: torch.Tensor, weight: torch.Tensor, memory: int) -> torch.Tensor:
    """Uninitialised fp32 [T', V']: the logits of as many tokens as ``memory`` bytes hold.

    V' is the least multiple of 4 that is not below V; columns from V on are 0.
    """
    vocab, width = len(weight), padded_width(len(weight), torch.float32)
    tokens = hidden.shape[:-1].numel()
    sums = hidden.new_empty(kept_tokens(tokens, vocab, memory), width, dtype=torch.float32)
    if len(sums):
        sums[:, vocab:] = 0
    return sums


def kept_tokens(tokens: int, vocab: int, memory: int) -> int:
    """Number of tokens whose logits ``memory`` bytes hold, at most ``tokens``."""
    most = memory // (torch.float32.itemsize * padded_width(vocab, torch.float32))
    return torch.sym_min(tokens, most)


def evaluate(
    launches: Launches,
    hidden: torch.Tensor,
    head: Head,
    rows: Rows,
    entropy: bool,
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(log p, lse2, entropy or None) of a whole head; ``sums`` gets logits that are kept."""
    parts = launches("logp_states", hidden, hidden, head, rows, entropy, sums)
    return launches("logp_finish", hidden, parts, rows)


def upstream_of(
    d_logp: torch.Tensor,
    d_entropy: torch.Tensor | None,
    rows: Rows,
    lse2: torch.Tensor,
    entropy: torch.Tensor | None,
) -> Upstream:
    """Flat terms of a token's gradient of the logits; 1 / τ = scale ln 2."""
    gradients = (d_logp, d_entropy if d_entropy is not None and d_entropy.numel() else None)
    # A CPU may have been told to take subnormals for zero.
    with ieee_on(lse2):
        inverse = rows.scale.double() * config.LN2
        of_logp, of_entropy = (
            None if g is None else (g.reshape(-1).double() * inverse).float() for g in gradients
        )
    entropy = None if of_entropy is None else entropy.reshape(-1)
    return Upstream(lse2.reshape(-1), of_logp, of_entropy, entropy)


def _shaped(results: tuple, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logp, lse2, entropy = results
    entropy = logp.new_empty(0) if entropy is None else entropy.view(target.shape)
    return logp.view(target.shape), lse2.view(target.shape), entropy


def empty_results(target: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Uninitialised results: of no tokens, or fake."""
    results = [target.new_empty(target.shape, dtype=torch.float32) for _ in range(3)]
    if not entropy:
        results[2] = results[2].new_empty(0)
    return tuple(results)


def empty_gradients(hidden, weight, bias, needs, main_grad=None) -> tuple[torch.Tensor, ...]:
    """Uninitialised gradients; without an element where one is not needed, or in main_grad."""
    needs = needs[0], needs[1] and main_grad is None, needs[2]
    operands = zip((hidden, weight, bias), needs, strict=True)
    return tuple(t.new_empty(t.shape) if need else hidden.new_empty(0) for t, need in operands)


def as_results(gradients: Sequence[torch.Tensor | None], hidden: torch.Tensor) -> tuple:
    """Flat gradients as results: shaped like the operands; without an element for None."""
    d_hidden, *others = gradients
    d_hidden = None if d_hidden is None else d_hidden.view(hidden.shape)
    return tuple(hidden.new_empty(0) if t is None else t for t in (d_hidden, *others))


def _run_linear_logp(
    launches, hidden, weight, bias, target, temperatures, main_grad, temperature, start, vocab,
    ignore_index, softcap, order, entropy, memory,
):  # fmt: skip
    if main_grad is not None:
        destination.check_no_alias(main_grad, hidden=hidden, weight=weight, bias=bias)
    sums = kept_sums(hidden, weight, memory)
    if target.numel() == 0:
        return *empty_results(target, entropy), sums
    head = Head(weight, bias, start, vocab, softcap, order)
    with ieee_on(hidden):
        rows = rows_of(target, temperatures, temperature, ignore_index, vocab)
        flat, kept = flat_rows(hidden, "logp_states"), sums if len(sums) else None
        return *_shaped(evaluate(launches, flat, head, rows, entropy, kept), target), sums


def _fake_linear_logp(hidden, weight, bias, target, *others):
    *_, entropy, memory = others
    tokens = kept_tokens(target.numel(), len(weight), memory)
    width = padded_width(len(weight), torch.float32)
    return *empty_results(target, entropy), hidden.new_empty(tokens, width, dtype=torch.float32)


def _run_backward(
    launches, d_logp, d_entropy, sums, hidden, weight, bias, target, temperatures, lse2, entropy,
    main_grad, temperature, start, vocab, ignore_index, softcap, order, needs,
):  # fmt: skip
    wanted = Needs(*needs)
    if main_grad is not None:
        destination.check_no_alias(main_grad, dlogp=d_logp, dentropy=d_entropy)
    if target.numel() == 0:
        empty = empty_gradients(hidden, weight, bias, needs, main_grad)
        return tuple(t.zero_() for t in empty)
    head = Head(weight, bias, start, vocab, softcap, order)
    with ieee_on(hidden):
        rows = rows_of(target, temperatures, temperature, ignore_index, vocab)
        upstream = upstream_of(d_logp, d_entropy, rows, lse2, entropy)
        flat = flat_rows(hidden, "logp_gradients")
        kept = sums if sums is not None and len(sums) else None
        walk = Pass(launches, flat, head, rows, upstream, kept)
        return as_results(chunks.gradients(walk, wanted, main_grad), hidden)


def _fake_backward(d_logp, d_entropy, sums, hidden, weight, bias, *others):
    return empty_gradients(hidden, weight, bias, others[-1], others[4])


def _setup_linear_logp(ctx, inputs, output):
    hidden, weight, bias, target, temperatures, main_grad, *ctx.numbers, ctx.entropy, memory = (
        inputs
    )
    _, lse2, entropy, sums = output
    # An empty tensor has no memory, and such calls no cached plan.
    kept, of_entropy = sums if memory else None, entropy if ctx.entropy else None
    ctx.save_for_backward(kept, hidden, weight, bias, target, temperatures, lse2, of_entropy)
    # Not a saved tensor: backward of an earlier micro-batch may write it before ours reads it.
    ctx.main_grad = main_grad if ctx.needs_input_grad[1] else None
    ctx.mark_non_differentiable(lse2, sums, *(() if ctx.entropy else (entropy,)))


def _backward_linear_logp(ctx, d_logp, _, d_entropy, __):
    if ctx.main_grad is not None:
        refuse_double("linear_logp")
    needs = list(ctx.needs_input_grad[:3])
    target = destination.targets(ctx, (True, True), {1: ctx.main_grad}, (d_logp, d_entropy))[1]
    needs[1] = target.wanted
    d_entropy = d_entropy if ctx.entropy else None
    results = linear_logp_backward(
        d_logp, d_entropy, *ctx.saved_tensors, target.into, *ctx.numbers, needs
    )
    target.written()
    needs[1] = target.returned
    return *(g if need else None for g, need in zip(results, needs, strict=True)), *(None,) * 11


def _run_log_probs(
    launches, logits, target, temperatures, temperature, vocab, ignore_index, softcap, entropy
):
    if target.numel() == 0:
        return empty_results(target, entropy)
    with ieee_on(logits):
        rows = rows_of(target, temperatures, temperature, ignore_index, vocab)
        flat = flat_rows(logits, "logit_states")
        layout = Logits(0, vocab, softcap)
        parts = launches("logit_states", logits, flat, layout, rows, entropy)
        return _shaped(launches("logp_finish", logits, parts, rows), target)


def _run_log_probs_backward(
    launches, d_logp, d_entropy, logits, target, temperatures, lse2, entropy, temperature, vocab,
    ignore_index, softcap,
):  # fmt: skip
    if target.numel() == 0:
        return logits.new_empty(logits.shape)
    with ieee_on(logits):
        rows = rows_of(target, temperatures, temperature, ignore_index, vocab)
        upstream = upstream_of(d_logp, d_entropy, rows, lse2, entropy)
        flat = flat_rows(logits, "logit_gradients")
        operands = flat, Logits(0, vocab, softcap), rows, upstream, logits.dtype
        gradient = launches("logit_gradients", logits, *operands)
    return gradient.contiguous().view(logits.shape)


def _setup_log_probs(ctx, inputs, output):
    logits, target, temperatures, *ctx.numbers, ctx.entropy = inputs
    _, lse2, entropy = output
    of_entropy = entropy if ctx.entropy else None
    ctx.save_for_backward(logits, target, temperatures, lse2, of_entropy)
    ctx.mark_non_differentiable(lse2, *(() if ctx.entropy else (entropy,)))


def _backward_log_probs(ctx, d_logp, _, d_entropy):
    d_entropy = d_entropy if ctx.entropy else None
    gradient = log_probs_backward(d_logp, d_entropy, *ctx.saved_tensors, *ctx.numbers)
    return gradient, *(None,) * 7


define = functools.partial(
    define_op,
    vmap=refuse_vmap(
        "linear_logp",
        "is not supported; its leading dimensions do the same: hidden [..., D], target [...]",
    ),
)
linear_logp = define(
    "linear_logp(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? temperatures, "
    "Tensor? main_grad, float temperature, int start, int vocab, int ignore_index, float softcap, "
    "str order, bool entropy, int memory) -> (Tensor, Tensor, Tensor, Tensor)",
    plan=plan_launches(_run_linear_logp),
    fake=_fake_linear_logp,
    setup=_setup_linear_logp,
    backward=_backward_linear_logp,
    autocast_args=(0, 1, 2),
)
linear_logp_backward = define(
    "linear_logp_backward(Tensor d_logp, Tensor? d_entropy, Tensor? sums, Tensor hidden, "
    "Tensor weight, Tensor? bias, Tensor target, Tensor? temperatures, Tensor lse2, "
    "Tensor? entropy, Tensor(a!)? main_grad, float temperature, int start, int vocab, "
    "int ignore_index, float softcap, str order, bool[] needs) -> (Tensor, Tensor, Tensor)",
    plan=plan_launches(_run_backward),
    fake=_fake_backward,
)
log_probs = define(
    "log_probs(Tensor logits, Tensor target, Tensor? temperatures, float temperature, int vocab, "
    "int ignore_index, float softcap, bool entropy) -> (Tensor, Tensor, Tensor)",
    plan=plan_launches(_run_log_probs),
    fake=lambda logits, target, *others: empty_results(target, others[-1]),
    setup=_setup_log_probs,
    backward=_backward_log_probs,
)
log_probs_backward = define(
    "log_probs_backward(Tensor d_logp, Tensor? d_entropy, Tensor logits, Tensor target, "
    "Tensor? temperatures, Tensor lse2, Tensor? entropy, float temperature, int vocab, "
    "int ignore_index, float softcap) -> Tensor",
    plan=plan_launches(_run_log_probs_backward),
    fake=lambda d_logp, d_entropy, logits, *others: logits.new_empty(logits.shape),
)
