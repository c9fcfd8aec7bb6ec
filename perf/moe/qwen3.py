"""A Qwen3-MoE of 8 layers: bytes of its rows in other surroundings, and times of a training step.

`python -m perf bench qwen3-moe`: the model is patched with ``strict=True``.  The logits of one
sequence in a batch, padded, in chunks and decoded with a cache are compared with those of one dense
forward.  A step is timed beside the same model with torch's ops and transformers' ``grouped_mm``.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core import record, watch
from ..core.room import with_room
from ..core.work import spreads

SYSTEMS = ("ours", "torch")
PARTS = ("rows", "training")
#: What is timed of a step, each until the device is idle.
PHASES = ("forward", "backward", "optimizer")
#: Products of records.
ROWS, TIMED = "model rows", tuple(f"model {part}" for part in (*PHASES, "step"))
WARM_UP = 3
#: With the compilation of every kernel.
_PATIENCE_S = 200.0


@dataclass(frozen=True)
class Size:
    """Size of the model and of what it runs on.

    inner: of an expert.  k: experts of a token.  length: tokens of the sequence whose rows are
    compared.  step: (sequences, tokens of each) of a training step.
    """

    hidden: int = 2048
    inner: int = 768
    experts: int = 64
    k: int = 8
    layers: int = 8
    heads: int = 32
    key_heads: int = 4
    head_dim: int = 128
    vocab: int = 32000
    length: int = 192
    step: tuple[int, int] = (2, 2048)

    @property
    def label(self) -> str:
        return f"qwen3-moe {self.hidden}x{self.layers}, {self.experts} experts"


#: A model that a CPU runs in seconds.
TINY = Size(64, 32, 8, 3, 2, 2, 1, 64, 97, 24, (2, 24))


def built(size: Size, device: str, system: str) -> torch.nn.Module:
    """The model in bf16; every system has the same random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        moe_intermediate_size=size.inner,
        num_local_experts=size.experts,
        num_experts_per_tok=size.k,
        norm_topk_prob=True,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        head_dim=size.head_dim,
        max_position_embeddings=4096,
        initializer_range=size.hidden**-0.5,
        attn_implementation="sdpa",
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    if system == "ours":
        import cute_kernels as ck

        ck.patch(model, strict=True)
    return model


def drawn(size: Size, shape: tuple[int, int], seed: int, device: str) -> torch.Tensor:
    """Random token ids."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(1, size.vocab, shape, generator=generator, device=device)


# ---- rows ----------------------------------------------------------------------------------------


def dense(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits of whole sequences, without a cache."""
    return model(input_ids=ids, use_cache=False).logits


def padded(model: torch.nn.Module, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Logits of the last sequence, padded on the left to the width of the others beside it."""
    width = others.shape[1] - ids.shape[1]
    mask = torch.cat((torch.ones_like(others), torch.nn.functional.pad(ids * 0 + 1, (width, 0))))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = torch.cat((others, torch.nn.functional.pad(ids, (width, 0))))
    out = model(input_ids=whole, attention_mask=mask, position_ids=positions, use_cache=False)
    return out.logits[-len(ids) :, width:]


def in_chunks(model: torch.nn.Module, ids: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """Logits of chunks, each behind a cache of those before."""
    from transformers import DynamicCache

    cache, rows = DynamicCache(config=model.config), []
    for first, end in itertools.pairwise([0, *cuts, ids.shape[1]]):
        inputs = {"input_ids": ids[:, first:end], "past_key_values": cache, "use_cache": True}
        rows.append(model(**inputs).logits)
    return torch.cat(rows, 1)


def surroundings(size: Size, device: str) -> dict[str, Callable]:
    """Name -> the logits of one sequence, given the model and the sequence."""
    n = size.length
    equal, wide = (drawn(size, (3, width), 9, device) for width in (n, n + 7))
    cuts, prompt = [n // 3, n // 3 + 1, 2 * n // 3], 2 * n // 3
    single = list(range(prompt, n))
    return {
        "again": dense,
        "in a batch": lambda model, ids: dense(model, torch.cat((equal, ids)))[3:],
        "padded on the left": lambda model, ids: padded(model, ids, wide),
        "in chunks": lambda model, ids: in_chunks(model, ids, cuts),
        "decoded": lambda model, ids: in_chunks(model, ids, single),
        "decoded in a batch": lambda model, ids: in_chunks(
            model, torch.cat((equal, ids)), single
        )[3:],
    }  # fmt: skip


@torch.no_grad()
def compared(size: Size, device: str, system: str) -> dict:
    """Bytes of logits that differ from those of one dense forward, by surroundings."""
    model = built(size, device, system).eval()
    ids = drawn(size, (1, size.length), 2, device)
    want = dense(model, ids)
    differing = {
        name: _differing_bytes(run(model, ids), want)
        for name, run in surroundings(size, device).items()
    }
    body = {
        "product": ROWS,
        "system": system,
        "bytes": want.numel() * want.element_size(),
        "differing_bytes": differing,
    }
    # Rows that are not finite would agree whatever they are.
    finite = bool(want.isfinite().all())
    if not finite:
        return body | {"status": "failed", "why": "logits are not finite"}
    same = {"rows": not any(differing.values())} if system == "ours" else {}
    return body | {"bitwise": same, "status": "ok"}


def _differing_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    a, b = (t.contiguous().view(torch.uint8) for t in (a, b))
    return int((a != b).sum())


# ---- a training step -----------------------------------------------------------------------------


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    finish: Callable[[], None],
) -> tuple[float, ...]:
    """Seconds of each phase, from an idle device until it is idle again."""
    marks = [_now(finish)]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    marks.append(_now(finish))
    loss.backward()
    marks.append(_now(finish))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    marks.append(_now(finish))
    return tuple(end - start for start, end in itertools.pairwise(marks))


def _now(finish: Callable[[], None]) -> float:
    finish()
    return time.perf_counter()


def timed(size: Size, device: str, systems: list[str], rounds: int) -> Iterator[dict]:
    """A record of each phase and of the step, for each system; systems take turns."""
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    ids = drawn(size, size.step, 1, device)
    models = {name: built(size, device, name).train() for name in systems}
    runs = {
        name: (model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), ids, finish)
        for name, model in models.items()
    }
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in systems}
    for number in range(WARM_UP + rounds):
        for name, operands in runs.items():
            seconds = with_room(step, *operands)
            if number >= WARM_UP:
                samples[name].append((*seconds, sum(seconds)))
    for index, product in enumerate(TIMED):
        times = {name: [1e6 * s[index] for s in some] for name, some in samples.items()}
        for name, fields in spreads(times).items():
            yield {"product": product, "system": name, "status": "ok"} | fields


# ---- records -------------------------------------------------------------------------------------


def measure(
    size: Size,
    parts: list[str],
    *,
    output: Path | None,
    rounds: int,
    device: str = "cuda",
    commit: str | None = None,
) -> Iterator[dict]:
    """Yields each record as it is written; without an output none is."""
    common = record.environment(commit) | {"kind": "bench", "kernel": "moe", "dtype": "bf16"}
    sequences, length = size.step
    shapes = {"rows": f"{size.label}, {size.length} tokens"}
    shapes["training"] = f"{size.label}, {sequences}x{length}"

    def recorded(part: str, body: dict) -> dict:
        body |= common | {"shape": shapes[part], "clocks": record.clocks()}
        if output is not None:
            record.append(output, body)
        return body

    patience = _PATIENCE_S if device == "cuda" else None
    for system in SYSTEMS if "rows" in parts else ():
        with watch.watched(patience):
            body = compared(size, device, system)
        yield recorded("rows", body)
        _release(device)
    if "training" in parts:
        with watch.watched(patience):
            bodies = list(timed(size, device, list(SYSTEMS), rounds))
        for body in bodies:
            yield recorded("training", body)
        _release(device)


def _release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def line(body: dict) -> str:
    """One record for the terminal."""
    head = f"{body['shape']:<46} {body['product']:<15} {body['system']:<6}"
    if body["status"] != "ok":
        return f"{head} {body['status']}: {body['why'][:100]}"
    if "differing_bytes" in body:
        counts = ", ".join(f"{name} {count}" for name, count in body["differing_bytes"].items())
        return f"{head} differing bytes of {body['bytes']}: {counts}"
    ratios = " ".join(f"{name} {ratio:.2f}" for name, ratio in body["ratio"].items())
    return f"{head} {body['median_us'] / 1e3:9.2f} ms  [{ratios}]"
