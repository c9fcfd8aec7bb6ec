"""Every causal LM of the installed transformers that builds from a tiny config: what holds in it.

    python -m tests.model.patch.all_causal_lms [--only TYPE ...] [--write]

Each type is patched with ``strict=True``; a row's logits are compared byte for byte alone, in a
batch, padded on either side, in chunks and decoded; so is the gradient of a sequence's embeddings.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import inspect
import itertools
import re
import signal
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import cute_kernels as ck
from cute_kernels.errors import PatchError
from tests.contract import same_bytes
from tests.model.patch import families

#: Heads of 64, 2 of them to a key; more tokens than a block of 128 keys.
VOCABULARY, HIDDEN, LENGTH = 97, 256, 133
HEADS, KEY_HEADS = 4, 2
#: Positions of a config, and the longest sequence of `_is_the_same_function`.
POSITIONS, LONG = 512, 300
#: Seconds that one type may take.
LIMIT = 300
#: Tiny value of settings -> their names in configs.
_VALUES = {
    HIDDEN: """hidden_size n_embd d_model emb_dim embedding_size input_embedding_size
        output_embedding_size embedding_dim lru_width attention_hidden_size""",
    160: """intermediate_size ffn_dim d_inner dff dim_ff n_inner ffn_hidden_size encoder_ffn_dim
        decoder_ffn_dim feed_forward_size intermediate_size_mlp""",
    HEADS: """num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads
        num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads""",
    KEY_HEADS: """num_key_value_heads num_kv_heads multi_query_group_num num_hidden_layers n_layer
        n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers
        num_hidden_groups num_blocks num_experts_per_tok num_experts_per_token moe_k moe_topk
        n_group num_expert_group type_vocab_size linear_num_key_heads attn_layer_period""",
    64: """head_dim d_head dim_head attention_head_size d_kv moe_intermediate_size mamba_d_head
        shared_expert_intermediate_size qk_rope_head_dim global_head_dim query_pre_attn_scalar""",
    POSITIONS: """max_position_embeddings n_positions max_seq_len n_ctx max_target_positions
        mamba_d_ssm""",
    32: """expert_ffn_hidden_size zero_expert_num kv_lora_rank q_lora_rank rotary_dim
        hidden_size_per_layer_input""",
    128: "qk_nope_head_dim v_head_dim",
    192: "qk_head_dim",
    24: "linear_value_head_dim",
    16: "ssm_state_size linear_key_head_dim",
    9: "sliding_window attention_window_size",
    8: "mamba_num_heads mamba_n_heads adapter_rank",
    1: "topk_group max_window_layers first_k_dense_replace num_dense_layers attn_layer_offset",
    0: "num_kv_shared_layers pad_token_id",
    0.15: "initializer_range",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
}
_TINY = {name: value for value, names in _VALUES.items() for name in names.split()}
_OFF = ("dropout", "pdrop", "drop_rate", "_dropout_prob", "layerdrop", "layer_dropout")
_BERT_LIKE = ("is_decoder",)
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64,
    "indexer_budget": 64, "indexer_compress_ratio": 16,
}  # fmt: skip
#: model_type -> settings that the others do not fit.
_SPECIAL: dict[str, dict[str, object]] = {
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "nemotron": {"num_key_value_heads": KEY_HEADS},
    "mamba2": {"num_heads": 8},
    # A real one has an attention layer, by whose cache the model counts its positions.
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "qwen4_exp": _QWEN4, "qwen4_exp_text": _QWEN4,
    "zamba2": {"attention_hidden_size": 2 * HIDDEN},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * HIDDEN,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "deepseek_v2": {
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "topk_method": "group_limited_greedy",
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "mimo_v2_flash": {"head_dim": 192},
    "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 2},
}  # fmt: skip
#: Lists of numbers that say what a layer is.
_KINDS_OF_LAYERS = ("no_rope_layers", "activation_sparsity_pattern")
_NAMES_OF_EXPERTS = ("Experts", "SparseMoe", "MoE", "MoeBlock", "Router")


def config_of(kind: str):
    """A tiny config of a type."""
    config = CONFIG_MAPPING[kind]()
    parts = {n: v for n, v in vars(config).items() if hasattr(v, "model_type")}
    layers = {name: _one_layer_of_each(part) for name, part in {"": config, **parts}.items()}
    for part in (config, *parts.values()):
        _shrink(part)
    changed = _constructor_settings(config) | layers[""]
    changed |= {k: True for k in _BERT_LIKE if k in vars(config) or _is_bert(kind)}
    changed |= _SPECIAL.get(kind, {})
    for name, part in parts.items():
        changed[name] = _constructor_settings(part) | layers[name]
    if "text_config" in parts:
        changed.pop("vocab_size", None)
    config = CONFIG_MAPPING[kind](**changed)
    # Some causal LMs are the text part of a larger model, and take its config.
    wanted = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]).config_class
    text = config.get_text_config()
    return text if type(text) is wanted else config


def _one_layer_of_each(config) -> dict:
    """Settings of a model with the first layer of each kind, in the order of the real one."""
    count = getattr(config, "num_hidden_layers", None) or 0
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count > 1 and name != "attention_layers"
    }
    kinds = {n: v for n, v in lists.items() if isinstance(v[0], str) or n in _KINDS_OF_LAYERS}
    chosen: list[int] = []
    seen: set = set()
    for layer in range(count if kinds else 0):
        new = {(name, values[layer]) for name, values in kinds.items()} - seen
        if new:
            chosen.append(layer)
            seen |= new
    if not chosen:
        return {}
    chosen = chosen if len(chosen) > 1 else [chosen[0], chosen[0]]
    settings = {name: [values[layer] for layer in chosen] for name, values in kinds.items()}
    if "num_attention_heads_per_layer" in lists:
        settings["num_attention_heads_per_layer"] = [HEADS] * len(chosen)
    if "layer_rope_theta" in lists:
        settings["layer_rope_theta"] = [lists["layer_rope_theta"][layer] for layer in chosen]
    return settings | {"num_hidden_layers": len(chosen)}


def _constructor_settings(config) -> dict:
    known = {*_TINY, "bos_token_id", "eos_token_id"}
    return {k: v for k, v in vars(config).items() if k in known or any(o in k for o in _OFF)}


def _is_bert(kind: str) -> bool:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind].lower()
    parts = "bert", "electra", "ernie", "data2vec", "xmod", "roformer", "megatron"
    return any(part in name for part in parts) and "4_5" not in name


def _shrink(config) -> None:
    names = vars(config)
    for name, value in _TINY.items():
        if name in names and not (names[name] is None and name not in ("head_dim", "pad_token_id")):
            with contextlib.suppress(Exception):  # a property without a setter
                setattr(config, name, value)
    for name, value in list(names.items()):
        if any(part in name for part in _OFF) and isinstance(value, float):
            setattr(config, name, 0.0)
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        config.num_key_value_heads = HEADS
    for name, value in (("bos_token_id", 1), ("eos_token_id", 2)):
        if name in names:
            setattr(config, name, value)


def build(kind: str) -> torch.nn.Module:
    """A tiny random model of a type in bf16, in evaluation."""
    torch.manual_seed(0)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = config_of(kind)
    with torch.device("meta"):
        count = sum(p.numel() for p in getattr(transformers, name)(config).parameters())
    if count > 30e6:
        raise MemoryError(f"{count / 1e6:.0f} M parameters")
    net = getattr(transformers, name)(config)
    families.randomize(net)
    # As from_pretrained(dtype=) does it, frequencies stay in float32.
    frequencies = [(module, dict(module.named_buffers(recurse=False))) for module in net.modules()]
    net = net.to(torch.bfloat16).eval()
    for module, buffers in frequencies:
        module._buffers.update({n: b for n, b in buffers.items() if n.endswith("inv_freq")})
    with torch.no_grad():
        logits = net(ids(), use_cache=False).logits
    if not bool(logits.isfinite().all()):
        raise ValueError("its logits are not finite")
    return net


def ids(batch: int = 1, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY - 1, (batch, length), generator=generator)


def _accepts(net: torch.nn.Module) -> set[str]:
    return set(inspect.signature(net.forward).parameters)


def whole(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of sequences side by side, at positions from 0 on."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return logits(net, tokens, position_ids=positions)


@torch.no_grad()
def logits(net: torch.nn.Module, tokens: torch.Tensor, **inputs: object) -> torch.Tensor:
    accepts = _accepts(net)
    inputs = {n: value for n, value in inputs.items() if n in accepts or "kwargs" in accepts}
    return net(tokens, use_cache=False, **inputs).logits


def padded(net: torch.nn.Module, tokens: torch.Tensor, side: str, beside: bool = True):
    """The logits of the tokens with padding on one side, beside a full sequence or alone."""
    width = (7, 0) if side == "left" else (0, 7)
    full = torch.nn.functional.pad(tokens, width, value=0)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), width, value=0)
    near = ids(1, full.shape[1], seed=5)
    if beside:
        full, mask = torch.cat((full, near)), torch.cat((mask, torch.ones_like(near)))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    out = logits(net, full, attention_mask=mask, position_ids=positions)[: len(tokens)]
    return out[:, 7:] if side == "left" else out[:, :-7]


@torch.no_grad()
def cached(net: torch.nn.Module, tokens: torch.Tensor, cuts: list[int], past: object = None):
    """The logits of the tokens, given piece by piece to a cache."""
    accepts, rows = _accepts(net), []
    # Mamba's cache has a name of its own.
    name = "cache_params" if "cache_params" in accepts else "past_key_values"
    for first, last in itertools.pairwise([0, *cuts, tokens.shape[1]]):
        positions = torch.arange(first, last)[None].expand(len(tokens), -1)
        inputs = {name: past, "position_ids": positions, "use_cache": True}
        inputs = {n: value for n, value in inputs.items() if n in accepts}
        out = net(tokens[:, first:last], **inputs)
        rows.append(out.logits)
        past = out[name]
    return torch.cat(rows, dim=1)


def static(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a prefill, a chunk and single tokens with a static cache that is too long."""
    past = transformers.StaticCache(net.config, max_cache_len=LENGTH + 16)
    return cached(net, tokens, [9, 12, 13, *range(126, 130)], past)


def packed(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of one sequence behind another in a row, told apart by their positions."""
    first = ids(1, 11, seed=6)
    positions = torch.cat([torch.arange(t.shape[1])[None] for t in (first, tokens)], dim=1)
    return logits(net, torch.cat((first, tokens), dim=1), position_ids=positions)[:, 11:]


def gradient(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Gradient of the first sequence's embeddings for a given gradient of its logits."""
    caught = []

    def hook(module, args, out):
        out.retain_grad()
        caught.append(out)

    handle = net.get_input_embeddings().register_forward_hook(hook)
    try:
        out = net(tokens, use_cache=False).logits
    finally:
        handle.remove()
    upstream = torch.randn(out.shape[1:], generator=torch.Generator().manual_seed(4))
    out.backward(upstream.to(out.dtype).expand(out.shape))
    return caught[0].grad[:1]


#: Name -> the logits of one sequence among other surroundings.
SURROUNDINGS = {
    "again": whole,
    "in a batch": lambda net, tokens: whole(net, torch.cat((ids(2, seed=7), tokens)))[2:],
    "left": lambda net, tokens: padded(net, tokens, "left"),
    "right": lambda net, tokens: padded(net, tokens, "right"),
    "chunks": lambda net, tokens: cached(net, tokens, [9, 10, 90, LENGTH - 3]),
    "decoded": lambda net, tokens: cached(net, tokens, [5, 6, 7, *range(126, 130)]),
    "static cache": static,
    "packs": packed,
}


def differing(net: torch.nn.Module) -> list[str]:
    """Surroundings in which a byte differs, or that do not run."""
    tokens = ids(1, seed=3)
    want, out = whole(net, tokens), []
    for name, run in SURROUNDINGS.items():
        try:
            rows = run(net, tokens)
            if name == "left" and "position_ids" not in _accepts(net):
                # It counts columns, or its mask: the reference has the same padding, alone.
                same = same_bytes(rows, padded(net, tokens, "left", beside=False))
            else:
                same = same_bytes(rows, want)
            if not same:
                out.append(name)
        except Exception as error:
            out.append(f"{name}: {type(error).__name__}: {error}"[:150])
    try:
        alone = gradient(net, tokens)
        if not same_bytes(gradient(net, torch.cat((tokens, ids(2, seed=8)))), alone):
            out.append("gradient")
    except Exception as error:
        out.append(f"gradient: {type(error).__name__}: {error}"[:150])
    return out


@torch.no_grad()
def _is_the_same_function(kind: str, net: torch.nn.Module) -> bool:
    """Whether a patched model is as near to float32 as the unpatched one, at `LONG` tokens.

    By the median of the errors of the rows: a row may take another expert, by a tie.
    """
    tokens = ids(1, LONG, seed=9)
    plain = build(kind)
    near, mine = logits(plain, tokens).float(), logits(net, tokens).float()
    exact = logits(plain.float(), tokens)
    errors = [(rows - exact).abs().amax(-1)[0, LENGTH:].median() for rows in (near, mine)]
    return bool(errors[1] <= 1.5 * errors[0] + 1e-6)


def is_moe(net: torch.nn.Module) -> bool:
    return any(any(part in type(m).__name__ for part in _NAMES_OF_EXPERTS) for m in net.modules())


def _tells_packs(kind: str) -> bool:
    """Whether the unpatched model, in float32, tells the sequences of a row apart."""
    net, tokens = build(kind).float(), ids(1, seed=3)
    takes = "position_ids" in _accepts(net)
    return takes and bool((packed(net, tokens) - whole(net, tokens)).abs().max() < 1e-3)


def _is_inconsistent(kind: str, wrong: list[str]) -> bool:
    """Whether the unpatched model, in float32, has other numbers there: no rounding explains it."""
    net, tokens = build(kind).float(), ids(1, seed=3)
    want = whole(net, tokens)
    rows = [SURROUNDINGS[name](net, tokens) for name in wrong if name in SURROUNDINGS]
    return len(rows) == len(wrong) and all((one - want).abs().max() > 0.1 for one in rows)


class _TooLong(BaseException):
    """A type that takes longer than `LIMIT`; no ``except Exception`` keeps it."""


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(kind: str, limit: int = LIMIT) -> tuple[str, str]:
    """Outcome of one type, of the page's or "differs", "inconsistent", "not decided"; details."""
    try:
        with _limited(limit):
            return _outcome(kind)
    except _TooLong:
        return "not decided", f"longer than {limit} seconds"


def _outcome(kind: str) -> tuple[str, str]:
    try:
        net = build(kind)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"[:200]
    moe = is_moe(net)
    try:
        report = ck.patch(net, strict=True)
    except PatchError as error:
        lines = str(error).splitlines()[1:-1]
        reasons = " | ".join(line.strip() for line in lines[:6])[:700]
        return "refused (MoE)" if moe else "refused", reasons
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"[:300]
    if not _is_the_same_function(kind, net):
        return "differs", f"at {LONG} tokens another function than the unpatched model"
    wrong = differing(net)
    # A model that does not look for packs itself: refused by name.
    wrong = [one for one in wrong if not one.startswith("packs: ArgumentValueError: position_ids")]
    if "packs" in wrong and not _tells_packs(kind):
        wrong.remove("packs")
    if wrong and _is_inconsistent(kind, wrong):
        return "inconsistent", f"{', '.join(wrong)}: other numbers, unpatched and in float32 too"
    if wrong:
        return "differs", "; ".join(wrong)
    routed = sum(one.by.startswith("ck.moe") for one in report.replaced)
    notes = [
        report.family or "",
        f"{routed} layers of experts" if routed else "" if not moe else "MoE",
    ]
    return "complete", ", ".join(filter(None, notes))


PAGE = Path(__file__).parents[3] / "docs" / "model_families.md"
_HEADER = """# Which causal LMs are complete

| model | `ck.patch` | `mesh=` | vLLM plug-in |
| --- | --- | --- | --- |
| Llama 3, Mistral, Qwen 2 and 2.5, Qwen 3, Gemma 3 (text) | yes | yes | yes |
| Gemma 2, Phi-3, OLMo 2, GPT-NeoX | yes | yes | refused |
| Mixtral, OLMoE, Qwen 2 MoE, Qwen 3 MoE | yes | in `tree` | one GPU, in `chain` |
| DeepSeek-V3, gpt-oss, Llama 4 (text), GLM-4 MoE | yes | refused | refused |
| Qwen2.5-VL and others with images | the text, with [`skip=`](model.md) | refused | refused |
| Qwen3-Next, Qwen 3.5 and its MoE (text), OLMo Hybrid, Kimi Linear | yes | refused | refused |
| Nemotron-H, Granite 4 hybrid, Falcon-H1, Bamba, Mamba 2, Zamba2 | yes | refused | refused |
| Jamba, Mamba, Falcon-Mamba | yes | refused | refused |
| FP8, INT8, INT4 weights | left, so `strict=True` refuses | refused | refused |

Below: every causal LM type of transformers {version}, from a tiny config in bf16 on a CPU: the
first layer of each kind, 4 heads of 64, 2 heads of keys, 133 tokens ({date}, commit {commit}).
`print(ck.patch(model))` has each reason in full.

- **complete**: `ck.patch(strict=True)` accepts it, and a row's logits, and the gradient of its
  embeddings, have the same bytes alone, in a batch, padded on either side (without `position_ids`
  on the left alone too), in chunks, with a dynamic and a static cache, and in a pack, where the
  model tells packs apart; else packs are refused.  At 300 tokens it is as near to float32 as the
  unpatched model.
- **refused**: the first of what torch still computes; **refused (MoE)**: of a mixture of experts.
- **not built**: no tiny config builds here.

{counts}

| outcome | details | types |
| --- | --- | --- |
"""

#: What a reason says -> the words of the page for it.
_BRIEF = {
    "state space or linear attention": "state space or linear attention",
    "do not declare that they take": "attention spelled out",
    "with the values of the mask": "attention that weighs its mask",
    "follows the longest sequence": "attention by the longest sequence",
    "ck.block_sparse_attention takes": "head sizes",
    "with ck.block_sparse_attention": "arguments of attention",
    "could not be observed": "not observed",
    "tower": "convolution of a tower",
    "vision_model": "convolution of a tower",
    "img_processor": "convolution of a tower",
    "convolution": "convolution",
    "a product": "product",
    "index_add": "index_add",
    "ck.rotary_table": "rotary embedding",
}


def recorded() -> dict[str, str]:
    """Type -> outcome, as the page says."""
    rows = [line.split("|") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row) == 5 and "`" in row[3]]
    return {kind: row[1].strip() for row in rows for kind in re.findall("`(.*?)`", row[3])}


def _brief(reason: str) -> str:
    """A reason in the few words of the page, without the module's name."""
    for key, words in _BRIEF.items():
        if key in reason:
            return words
    return " ".join(re.sub(r"^.*? \(\w+\): ", "", reason).split()[:8])


def _rank(row: tuple[str, str]) -> tuple[bool, bool, tuple[str, str]]:
    """The order of rows: complete types first, those that were not built last."""
    return row[0] != "complete", row[0] == "not built", row


def page(outcomes: dict[str, tuple[str, str]], date: str, commit: str) -> str:
    """The page of docs."""
    counts = Counter(state for state, _ in outcomes.values())
    text = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    header = _HEADER.format(
        version=transformers.__version__, date=date, commit=commit, counts=f"{text}."
    )
    rows: dict[tuple[str, str], list[str]] = {}
    for kind, (state, details) in sorted(outcomes.items()):
        first = " ".join(details.split(" | ")[0].split()).replace("|", "/")
        brief = "–" if state == "not built" else _brief(first)
        if state == "complete":
            brief = "mixtures of experts" if "experts" in first or "MoE" in first else "dense"
        rows.setdefault((state, brief), []).append(f"`{kind}`")
    lines = [f"| {' | '.join(key)} | {', '.join(rows[key])} |" for key in sorted(rows, key=_rank)]
    return header + "\n".join(lines) + "\n"


def _lines(file: str) -> list[str]:
    return Path(file).read_text(encoding="utf-8").splitlines()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="types")
    parser.add_argument("--known", nargs="*", default=[], help="files with the lines of other runs")
    parser.add_argument("--write", action="store_true", help="write docs/model_families.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines = [line.split("\t") for file in options.known for line in _lines(file)]
    outcomes = {line[0]: (line[1], line[3].strip()) for line in lines if len(line) == 4}
    for kind in options.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if kind in outcomes:
            continue
        start = time.time()
        state, details = outcomes[kind] = outcome(kind)
        seconds = time.time() - start
        details = " ".join(details.split())
        print(f"{kind}\t{state}\t{seconds:.1f}s\t{details}", flush=True)
        gc.collect()
    states = [state for state, _ in outcomes.values()]
    print({state: states.count(state) for state in sorted(set(states))})
    if options.write:
        git = ("git", "rev-parse", "--short", "HEAD")
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        today = datetime.date.today().isoformat()
        PAGE.write_text(page(outcomes, today, commit), encoding="utf-8")


if __name__ == "__main__":
    main()
