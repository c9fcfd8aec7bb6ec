"""Log-probs of causal LMs without logits: bytes, configs, positions of padding, what is refused."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
import transformers
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import BaseModelOutputWithPast

import cute_kernels as ck
from cute_kernels.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CuteKernelsError,
    DtypeError,
    GatherError,
    ShapeError,
)
from cute_kernels.integrations import causal_lm, gathering, sharded_head
from cute_kernels.integrations.token_logps import policy_loss, token_logps
from tests.contract import same_bytes
from tests.integrations import tiny
from tests.model.patch import families
from tests.ranks import joined

IDS = torch.randint(0, tiny.VOCAB, (3, 10), generator=torch.Generator().manual_seed(5))
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": tiny.VOCAB}


def of(config) -> torch.nn.Module:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # So that a soft cap of 30 and a bias change something.
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(20)
        if head.bias is not None:
            head.bias.normal_()
    return model


def gemma2(**settings) -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(**SMALL, head_dim=32, **settings)


GPT2 = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": tiny.VOCAB}
#: Untied and tied heads, one with a bias, caps and scales: what transformers has them in.
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gpt2, tied": lambda: transformers.GPT2Config(**GPT2),
    "phi, bias": lambda: transformers.PhiConfig(**SMALL),
    "gemma2, soft cap": gemma2,
    "gemma2, soft cap 5": lambda: gemma2(final_logit_softcapping=5.0),
    "gemma2, no cap": lambda: gemma2(final_logit_softcapping=None),
    "cohere, logit_scale": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.25),
    "granite, logits_scaling": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=8.0),
}


def from_logits(model, ids=IDS, **inputs) -> torch.Tensor:
    logits = model(ids, **inputs).logits[:, :-1].double()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


# ---- what comes out -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_any_causal_lm_against_its_own_logits(name):
    """Log-probs are those of fp32 logits up to rounding; a missing cap or scale is far off.

    Positions, caps, scales and biases of a policy loss are the same: its ratios are exactly 1.
    """
    model = of(MODELS[name]())
    out, old = grpo(model)
    assert out.metrics.ratio.item() == 1.0 and out.metrics.clip_fraction.item() == 0.0
    assert same_bytes(out.logp, old) and bool((old < 0).any())
    with torch.no_grad():
        got, want = token_logps(model, IDS), from_logits(model)
        assert got.dtype == torch.float32 and got.shape == (3, 9)
        assert (got - want).abs().max() < 1e-4
        if name == "gemma2, soft cap 5":
            model.config.final_logit_softcapping = None
            assert (token_logps(model, IDS) - want).abs().max() > 0.1


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_the_ops_on_the_hidden_states(tied, monkeypatch):
    """Bytes are the ops'; the head is not multiplied, so that there are no logits."""
    model, linear = tiny.llama(tied), torch.nn.functional
    monkeypatch.setattr(linear, "linear", lambda *a, **k: pytest.fail("the head was multiplied"))
    hidden = model.model(IDS, use_cache=False).last_hidden_state[:, :-1]
    head, parameters = model.lm_head.weight, list(model.parameters())
    options = {"temperature": 0.7, "return_entropy": True}
    want = ck.linear_logp(hidden, head, IDS[:, 1:], **options)
    got = token_logps(model, IDS, **options)
    assert all(same_bytes(a.detach(), b.detach()) for a, b in zip(got, want, strict=True))
    options = {"loss": "dapo", "advantages": torch.randn(3, 9), "kl_weight": 0.1}
    options |= {"old_logp": torch.randn(3, 9) - 5, "reference_logp": torch.randn(3, 9) - 5}
    loss = policy_loss(model, IDS, temperature=0.7, **options)
    loss_of_op = ck.linear_policy_loss(hidden, head, IDS[:, 1:], temperature=0.7, **options)
    assert same_bytes(loss.loss.detach(), loss_of_op.loss.detach())
    assert same_bytes(loss.logp, loss_of_op.logp)
    sums = [sum(t.sum() for t in out) for out in (got, want)]
    for pair in (sums, (loss.loss, loss_of_op.loss)):
        grads = [torch.autograd.grad(t, parameters, retain_graph=True) for t in pair]
        assert all(a.any() and same_bytes(a, b) for a, b in zip(*grads, strict=True))


def test_targets_that_are_the_ids_are_refused():
    """transformers shifts labels, token_logps does not."""
    model, labels = tiny.llama(), IDS.clone()
    labels[:, :4] = -100
    for targets in (IDS, IDS.int(), labels):
        with pytest.raises(ArgumentValueError, match=r"^targets: expected the tokens after those"):
            token_logps(model, IDS, targets)
    same = torch.full_like(IDS, 7)
    sampled = IDS[:, -1:].clone()
    one = torch.full_like(IDS, -100)
    one[:, 5] = IDS[:, 5]
    for ids, targets in ((same, same.clone()), (IDS[:, -1:], sampled), (IDS, one)):
        assert token_logps(model, ids, targets).shape == ids.shape


def test_masked_tokens_are_zero_and_have_no_gradient():
    model = tiny.llama()
    seen = torch.ones_like(IDS)
    seen[0, :4] = 0  # padding on the left: neither position 3 nor token 4 has a say
    seen[2, 7:] = 0
    got = token_logps(model, IDS, attention_mask=seen)
    zero = torch.zeros(3, 9, dtype=torch.bool)
    zero[0, :4] = True
    zero[2, 6:] = True
    assert ((got == 0) == zero).all()
    got[zero].sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


def test_autocast():
    """The head and the hidden states in bf16, gradients in fp32: the bytes of casts by hand."""
    model = tiny.llama()
    with torch.autocast("cpu", torch.bfloat16):
        got = token_logps(model, IDS)
        hidden = model.model(IDS, use_cache=False).last_hidden_state[:, :-1]
    weight = model.lm_head.weight
    want = ck.linear_logp(hidden.bfloat16(), weight.bfloat16(), IDS[:, 1:])
    assert got.dtype == torch.float32 and same_bytes(got.detach(), want.detach())
    one, two = (torch.autograd.grad(t.sum(), weight)[0] for t in (got, want))
    assert one.dtype == torch.float32 and same_bytes(one, two)


def test_what_decides_which_tokens_are_scored():
    """Targets are not shifted, and those that are ignored never looked up; a padded vocabulary."""
    model, whole = tiny.llama(), token_logps(tiny.llama(), IDS)
    targets = IDS.roll(-1, 1)
    targets[:, -1] = -100
    got = token_logps(model, IDS, targets)
    assert same_bytes(got[:, :-1], whole) and (got[:, -1] == 0).all()
    assert same_bytes(token_logps(model, IDS, targets, last=3), got[:, -3:])
    assert same_bytes(token_logps(model, IDS, last=4), whole[:, -4:])
    odd = torch.where(IDS % 2 == 0, IDS.flip(0), -7)
    assert ((token_logps(model, IDS, odd, ignore_index=-7) == 0) == (IDS % 2 != 0)).all()
    out = policy_loss(model, IDS, last=4, advantages=torch.ones(3), old_logp=whole[:, -4:].detach())
    assert same_bytes(out.logp, whole[:, -4:].detach()) and out.metrics.ratio.item() == 1.0
    for options in ({"return_dict": False}, {"output_hidden_states": True}):
        assert same_bytes(token_logps(model, IDS, **options), whole)
    short = token_logps(model, IDS % 80, vocab_size=80)
    with torch.no_grad():
        model.lm_head.weight[80:] = float("nan")
    assert same_bytes(token_logps(model, IDS % 80, vocab_size=80), short)


# ---- positions of padded sequences --------------------------------------------------------------

PAD, LENGTH = 5, 12


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]:
    """(ids of one sequence, a batch of it and another, the mask, where its log-probs are)."""
    one = families.ids(1, LENGTH)
    width = {"left": (PAD, 0), "right": (0, PAD)}[side]
    ids = torch.nn.functional.pad(one, width, value=3)
    mask = torch.nn.functional.pad(torch.ones_like(one), width)
    other = families.ids(1, LENGTH + PAD, seed=4)
    first = width[0]
    columns = slice(first, first + LENGTH - 1)
    return one, torch.cat((ids, other)), torch.cat((mask, torch.ones_like(other))), columns


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
@torch.no_grad()
def test_padding_does_not_change_bytes(name, side):
    model = families.model(name)
    ck.patch(model)
    one, ids, mask, columns = padded(side)
    want = token_logps(model, one)
    assert same_bytes(token_logps(model, ids, attention_mask=mask)[:1, columns], want)
    # With targets nothing is shifted, and positions are the same.
    targets = ids.roll(-1, 1).masked_fill(mask.roll(-1, 1) == 0, -100)
    got = token_logps(model, ids, targets, attention_mask=mask)[:1, columns]
    assert same_bytes(got, want)


TABLES = {
    "gpt2": transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=tiny.VOCAB + 1),
    "opt": transformers.OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2
    ),
    "bloom": transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=2),
}


@pytest.mark.parametrize("name", TABLES)
@torch.no_grad()
def test_learned_positions_and_alibi(name):
    """Columns taken for positions are off by far more than rounding."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(TABLES[name]).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    one, ids, mask, columns = padded("left")
    want = token_logps(model, one)
    got = token_logps(model, ids, attention_mask=mask)[:1, columns]
    assert (got - want).abs().max() < 1e-3
    if name == "gpt2":  # the caller's own positions count
        given = torch.arange(ids.shape[1])[None].expand_as(ids)
        got = token_logps(model, ids, attention_mask=mask, position_ids=given)[:1, columns]
        assert (got - want).abs().max() > 0.1


def test_a_table_without_position_ids_refuses_padding_before_tokens():
    torch.manual_seed(0)
    sizes = {"d_model": 64, "decoder_layers": 1, "decoder_ffn_dim": 64}
    config = transformers.BartConfig(
        vocab_size=97, decoder_attention_heads=2, pad_token_id=0, **sizes
    )
    model = transformers.BartForCausalLM(config).eval()
    one, ids, mask, columns = padded("right")
    got = token_logps(model, ids, attention_mask=mask)[:1, columns]
    assert (got - token_logps(model, one)).abs().max() < 1e-3
    with pytest.raises(ArgumentValueError, match=r"attention_mask: .*BartDecoder.*position_ids"):
        token_logps(model, ids.flip(1), attention_mask=mask.flip(1))


# ---- a policy loss ------------------------------------------------------------------------------


def grpo(model, **inputs):
    """(`policy_loss` of a batch with padding on the left, its log p by `token_logps`)."""
    seen = torch.ones_like(IDS)
    seen[0, :4] = 0
    with torch.no_grad():
        old = token_logps(model, IDS, attention_mask=seen)
    given = {"advantages": torch.tensor([1.0, -0.5, 0.25]), "old_logp": old} | inputs
    return policy_loss(model, IDS, attention_mask=seen, **given), old


def done(bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "LoRA"])
def test_a_policy_loss_through_wrappers(tmp_path, adapter):
    model = tiny.llama()
    if adapter:
        peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[trl]'")
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        ck.patch(model, attention=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    want, old = grpo(model)
    gradients = torch.autograd.grad(want.loss, trained)
    reduced = []
    with joined(0, str(tmp_path / "store"), 1):
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, lambda state, bucket: reduced.append(1) or done(bucket))
        out, same = grpo(wrapped)
        assert same_bytes(out.loss.detach(), want.loss.detach()) and same_bytes(out.logp, same)
        out.loss.backward()
    assert reduced and out.metrics.ratio.item() == 1.0 and same_bytes(old, same)
    assert all(same_bytes(p.grad, g) for p, g in zip(trained, gradients, strict=True))
    assert any(g.any() for g in gradients)


def test_a_heads_main_grad():
    """`token_logps` adds into it, where it wrote ``grad``; a fused loss refuses it by name."""
    model = tiny.llama()
    ck.patch(model, attention=False, main_grad=True)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    gradient = torch.autograd.grad(token_logps(model, IDS).sum(), model.lm_head.weight)[0]
    token_logps(model, IDS).sum().backward()
    assert model.lm_head.weight.grad is None and gradient.any()
    assert (model.lm_head.weight.main_grad - gradient).abs().max() < 1e-4 * gradient.abs().max()
    with pytest.raises(ArgumentValueError, match=r"a head .*got one with main_grad"):
        policy_loss(model, IDS, loss="policy_gradient", advantages=torch.ones(3))
    for parameter in model.parameters():
        del parameter.main_grad
    assert policy_loss(model, IDS, loss="cross_entropy").loss.requires_grad


# ---- wrappers -----------------------------------------------------------------------------------


def test_compiled_and_wrapped_twice():
    model = tiny.llama()

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **{**kwargs, "labels": None})

    want = token_logps(model, IDS)
    assert same_bytes(token_logps(torch.compile(model), IDS), want)
    model.compile(backend=lambda *a: pytest.fail("it was compiled"))
    compiled = model._compiled_call_impl
    assert same_bytes(token_logps(model, IDS), want)
    assert model._compiled_call_impl is compiled
    assert same_bytes(token_logps(Wrapper(Wrapper(model)), IDS), want)


def test_the_model_is_as_before_also_after_an_error():
    model = tiny.llama()
    logits = model(IDS).logits
    token_logps(model, IDS)
    assert same_bytes(model(IDS).logits, logits)
    with pytest.raises(ArgumentTypeError):
        token_logps(model, IDS, temperature="hot")
    assert same_bytes(model(IDS).logits, logits)
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    model.forward = forward = model.forward  # as accelerate does
    token_logps(model, IDS)
    assert model.forward is forward


# ---- hidden states ------------------------------------------------------------------------------

H, OTHER = torch.zeros(2, 3, 8), torch.ones(2, 3, 8)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    hidden_states: tuple = ()


Named = collections.namedtuple("Named", ["logits", "hidden"])

LAST, STATES = "last_hidden_state", "hidden_states"
FOUND = [
    H,
    (H, None, ((H, H),)),
    [torch.zeros(2, 3, 9), H],
    (torch.zeros(2, 8), H, torch.zeros(())),
    {LAST: H, "hidden": OTHER, STATES: (OTHER,)},
    {"hidden": H, STATES: (OTHER,), "x": OTHER},
    {LAST: None, STATES: (OTHER, H)},
    {STATES: H},
    BaseModelOutputWithPast(last_hidden_state=H, hidden_states=(OTHER, OTHER)),
    Output(H, (OTHER,)),
    Named(OTHER, H),
]


def test_hidden_states_are_found():
    for number, output in enumerate(FOUND):
        assert causal_lm.hidden_states(output, 8) is H, number


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ((H, OTHER), r"exactly one tensor \[batch, sequence, 8\], got 2 of 2"),
        ((torch.zeros(2, 3, 9),), "got 0 of 1"),
        ({"logits": H}, "one of last_hidden_state, hidden, hidden_states, got dict"),
        (None, "one of last_hidden_state.*got NoneType"),
        ({"last_hidden_state": torch.zeros(2, 3, 9)}, r"last_hidden_state: .*got \[2, 3, 9\]"),
        ({"hidden_states": torch.zeros(4, 2, 3, 8)}, r"hidden_states: .*got \[4, 2, 3, 8\]"),
        ({"hidden_states": ()}, "hidden_states: .*got tuple"),
        (torch.zeros(6, 8), r"got \[6, 8\]"),
    ],
)
def test_hidden_states_that_are_not_there_once(output, said):
    with pytest.raises(ArgumentTypeError, match=said):
        causal_lm.hidden_states(output, 8)


# ---- refusals -----------------------------------------------------------------------------------


def llama_with(change) -> torch.nn.Module:
    model = tiny.llama()
    change(model)
    return model


def integers() -> torch.nn.Module:
    weight = torch.zeros(tiny.VOCAB, tiny.WIDTH, dtype=torch.uint8)
    weight = torch.nn.Parameter(weight, requires_grad=False)
    return llama_with(lambda model: setattr(model.lm_head, "weight", weight))


def adapted() -> torch.nn.Module:
    weight_norm = torch.nn.utils.parametrizations.weight_norm
    return llama_with(lambda model: weight_norm(model.lm_head))


def between() -> torch.nn.Module:
    norm = torch.nn.LayerNorm(tiny.VOCAB)
    return llama_with(lambda model: setattr(model, "norm_of_logits", norm))


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(**SMALL, is_decoder=True)
    return transformers.AutoModelForCausalLM.from_config(config)


def configured(**settings) -> torch.nn.Module:
    return llama_with(lambda model: vars(model.config).update(settings))


def capped(**settings) -> torch.nn.Module:
    return configured(final_logit_softcapping=30.0, **settings)


NO_HEAD = r"get_output_embeddings\(\): expected a linear layer"
BAD_MODELS = [
    (lambda: 3, ArgumentTypeError, "model: expected a torch.nn.Module, got int"),
    (lambda: torch.nn.Linear(2, 2), ArgumentTypeError, "a causal language model.*got Linear"),
    (lambda: tiny.llama().model, ArgumentTypeError, "base_model|get_output_embeddings"),
    (lambda: llama_with(lambda m: setattr(m, "lm_head", None)), ArgumentTypeError, NO_HEAD),
    (adapted, ArgumentTypeError, NO_HEAD),
    (integers, ArgumentTypeError, NO_HEAD),
    (between, ArgumentTypeError, "norm_of_logits.weight between or beside"),
    (bert, ArgumentTypeError, "cls.predictions.*between or beside"),
    (lambda: configured(logit_scale=0.5), ArgumentValueError, "config.logit_scale: .*got 0.5"),
    (lambda: configured(logits_scaling=2.0), ArgumentValueError, "config.logits_scaling"),
    (lambda: configured(lm_head_multiplier=2.0), ArgumentValueError, "config.lm_head_multiplier"),
    (lambda: capped(logits_soft_cap=30.0), ArgumentValueError, "config.logits_soft_cap"),
    (
        lambda: capped(model_type="cohere", logit_scale=0.5),
        ArgumentValueError,
        "final_logit_softcapping and logit_scale: expected a scale or a soft cap",
    ),
]


@pytest.mark.parametrize(("make", "error", "said"), BAD_MODELS)
def test_models_that_are_refused(make, error, said):
    with pytest.raises(error, match=said):
        token_logps(make(), IDS)


def bad_id(value: int) -> torch.Tensor:
    ids = IDS.clone()
    ids[1, 2] = value
    return ids


BAD_INPUTS = [
    ((bad_id(tiny.VOCAB),), {}, ArgumentValueError, "input_ids: .*vocabulary of 96, got 96"),
    ((bad_id(-100),), {}, ArgumentValueError, "input_ids: .*vocabulary of 96, got -100"),
    ((IDS.float(),), {}, DtypeError, "input_ids: .*int64"),
    ((IDS[0],), {}, ShapeError, r"input_ids: expected 2 dimensions \[B, S\]"),
    (([[1]],), {}, ArgumentTypeError, "input_ids: expected a torch.Tensor, got list"),
    ((IDS, IDS[:, 1:]), {}, ShapeError, r"targets: expected None \(score input_ids\[:, 1:\]\), or"),
    ((IDS, IDS.float()), {}, DtypeError, "targets"),
    ((IDS, bad_id(tiny.VOCAB)), {}, ArgumentValueError, "target"),
    ((IDS,), {"attention_mask": IDS[:, 1:]}, ShapeError, "attention_mask: .*give targets"),
    ((IDS,), {"attention_mask": [1]}, ArgumentTypeError, "attention_mask"),
    ((IDS,), {"temperature": torch.ones(3, 10)}, ShapeError, "temperature"),
    ((IDS,), {"vocab_size": 97}, ArgumentValueError, "vocab_size"),
    ((IDS,), {"last": 10}, ArgumentValueError, "last: expected 0 .*of the 9 tokens .*got 10"),
    ((IDS,), {"last": True}, ArgumentValueError, "last: .*got True"),
]


@pytest.mark.parametrize(("args", "options", "error", "said"), BAD_INPUTS)
def test_inputs_that_are_refused(args, options, error, said):
    """Ids are checked before the model runs."""
    model = tiny.llama()
    if said.startswith("input_ids"):
        model.model.register_forward_pre_hook(lambda *a: pytest.fail("the model ran"))
    with pytest.raises(error, match=said) as caught:
        token_logps(model, *args, **options)
    assert isinstance(caught.value, CuteKernelsError)


def test_a_base_model_that_drops_tokens():
    model = tiny.llama()
    ck.unpatch(model.model)
    model.model.register_forward_hook(lambda m, args, out: (out.last_hidden_state[:, 1:],))
    with pytest.raises(ArgumentTypeError, match="one hidden state a token"):
        token_logps(model, IDS)


# ---- a head that somebody else holds ------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "cast", "frozen"),
    [
        (False, None, ()),
        (True, None, ()),
        (True, torch.bfloat16, ()),
        (True, None, "weight"),
        (True, None, "hidden"),
        (True, torch.bfloat16, "bias"),
    ],
)
def test_a_sharded_head_has_the_bytes_of_the_op(monkeypatch, bias, cast, frozen):
    """The step with gathers of its own, where nothing has to be gathered."""
    torch.manual_seed(3)
    head = torch.nn.Linear(8, 40, bias=bias)
    hidden = torch.randn(2, 5, 8).requires_grad_(frozen != "hidden")
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != frozen)
    target = torch.randint(0, 37, (2, 5))
    target[1, 1] = -100
    options = {"softcap": 4.0, "return_entropy": True, "vocab_size": 37}
    scoring = sharded_head.Scoring(temperature=torch.rand(2, 5) + 0.5, **options)
    given = [t for t in (hidden, *head.parameters()) if t.requires_grad]
    upstream = [torch.randn(2, 5), torch.randn(2, 5)]
    results = []
    for held in (False, True):
        monkeypatch.setattr(gathering, "is_sharded", lambda p, held=held: held)
        with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
            out = sharded_head.head_logp(head, hidden, target, scoring)
        gradients = torch.autograd.grad(out, given, upstream)
        results.append([*(t.detach() for t in out), *gradients])
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))
    assert len(results[0]) == 2 + len(given)


def test_a_parameter_in_flight_is_refused():
    class State:
        name = "INFLIGHT"

    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_status = State
    with (
        pytest.raises(GatherError, match="fetched for another module"),
        gathering.whole((parameter,)),
    ):
        pytest.fail("it was taken for a whole one")


def test_a_model_without_a_config_leaves_logits_as_they_are():
    assert causal_lm.transform(torch.nn.Linear(2, 2)) == (1.0, 0.0)
