"""The contract of an inference engine, for its RPC; and the parts that a contract's formulas name.

vLLM's ``collective_rpc`` runs a function, or a worker's method by name, in every worker:

    ids = llm.collective_rpc(worker_contract)                       # a function of the worker
    LLM(..., worker_extension_cls="cute_kernels.integrations.contract_exchange.WorkerExtension")
    ids = llm.collective_rpc("cute_kernels_contract")               # a method, by its name

Either returns a plain dict for each worker, which the trainer gives to ``ck.compare_contracts``.

A module of an engine says in its attribute `PART` what computes it, as the layers of our vLLM
plug-in do: a `ContractPart`, several, or a function of the model's dtype that returns them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from ..errors import ArgumentTypeError, ArgumentValueError, ContractError, expected
from ..rowwise.config import rotary_pos_emb_facts
from ..runtime import checking
from ..runtime.process_contract import Contract, compare_contracts, of_device
from . import foreign_calls, model_settings, published, tensor_parallel
from .engine_layers import Rule
from .model_settings import Stated
from .publish import WEIGHTS, Manifest

assert tensor_parallel  # importing it registers the contracts of its ops

#: Attribute of an engine's module, and of the ``impl`` of its attention layers.
PART = "cute_kernels_part"
#: How `engine_statement` begins without the plug-in.
STOCK = "stock vllm"
ATTENTION = "ck.block_sparse_attention, ck.paged_attention"


class ContractPart(NamedTuple):
    """Implementation of one kind of layer.

    Attributes:
        kind: ``"linear"``, ``"embedding"``, ``"rms_norm"``, ``"layer_norm"``, ``"activation"``,
            ``"rotary"``, ``"attention"``, ``"logits"``, ``"router"``, ``"experts"`` or ``"mixer"``.
        formula: The op, with every option that its bits depend on.
        order: Of the sums of a linear layer; None elsewhere.
        layers: Numbers of the layers that it is of; None: of the one that its module lies in.
    """

    kind: str
    formula: str
    order: str | None = None
    layers: tuple[int, ...] | None = None


def linear_part(order: str = "chain") -> ContractPart:
    """Return the part of a linear layer or head, cut over ranks or not."""
    return ContractPart("linear", "ck.linear", order)


def embedding_part() -> ContractPart:
    """Return the part of a table of embeddings."""
    return ContractPart("embedding", "ck.embedding")


def norm_part(kind: str, eps: float, offset: float = 0.0) -> ContractPart:
    """Return the part of a norm: kind ``"rms_norm"`` or ``"layer_norm"``."""
    return ContractPart(kind, f"ck.{kind}, eps {float(eps)!r}, offset {float(offset)!r}")


def activation_part(op: str) -> ContractPart:
    """Return the part of an activation, by its op.

    ``"silu"`` is rounded before it is multiplied with the other half of a gated layer;
    ``"silu_mul"`` is not.
    """
    return ContractPart("activation", f"ck.{op}")


def rotary_part(
    table_dtype: torch.dtype, frequencies: torch.Tensor, scaling: float = 1.0
) -> ContractPart:
    """Return the part of a rotary embedding in transformers' steps.

    Args:
        table_dtype: Of cos and sin.
        frequencies: fp32 [rotary_dim / 2]; a digest of their bytes is in the formula, as base,
            width and kinds of scaling all show there.
        scaling: Of cos and sin: transformers' ``attention_scaling``.
    """
    name = str(table_dtype).removeprefix("torch.")
    steps = rotary_pos_emb_facts("cpu", None)["forward"]
    digest = model_settings.tensor_digest(frequencies.to(torch.float32))
    table = f"table by ck.rotary_table in {name}, frequencies {digest}, scaling {float(scaling)!r}"
    return ContractPart("rotary", f"{steps}; {table}")


def attention_part() -> ContractPart:
    """Return the part of attention, over pages or not: the bits are the same."""
    return ContractPart("attention", ATTENTION)


def logits_part(softcap: float = 0.0, scale: float = 1.0) -> ContractPart:
    """Return the part between the head and the logits."""
    return ContractPart("logits", f"softcap {float(softcap)!r}, scale {float(scale)!r}")


def router_part(rule: Rule) -> ContractPart:
    """Return the part of a router behind its product."""
    return ContractPart("router", rule.formula)


def experts_part() -> ContractPart:
    """Return the part of experts with SiLU gates."""
    products = "ck.grouped_linear, ck.silu rounded, times up, ck.grouped_linear"
    return ContractPart("experts", f"ck.moe.permute, {products}, ck.moe.combine")


def mixer_part(
    rule: str,
    heads: tuple[int, int],
    sizes: tuple[int, int],
    steps: tuple[float, float] | None = None,
) -> ContractPart:
    """Return the part of a mixer with a state, by its rule's op.

    Args:
        rule: Name of the op.
        heads, sizes: As `ck.LinearAttentionCache` has them.
        steps: The least and the greatest step of a scan of Mamba-2.
    """
    norm = "norm before gate" if steps is None else "gate before norm"
    limits = "" if steps is None else f" with steps from {steps[0]!r} to {steps[1]!r}"
    text = f"ck.causal_conv1d_fn, silu, ck.{rule}{limits}, ck.gated_rms_norm, {norm}"
    text += f"; heads {heads}, sizes {sizes}"
    return ContractPart("mixer", text)


def foreign_part(module: torch.nn.Module) -> ContractPart | None:
    """Return the part of a module that no op of ours computes; None: it is no layer by itself."""
    cls, impl = type(module), getattr(module, "impl", None)
    if hasattr(impl, "num_kv_heads"):  # an attention layer of vLLM's
        return ContractPart("attention", _named(type(impl)))
    name, home = cls.__name__.lower(), cls.__module__
    # Engines have classes of their own: QKVParallelLinear, ParallelLMHead, VocabParallelEmbedding.
    if isinstance(module, torch.nn.Linear) or name.endswith(("linear", "lmhead")):
        kind = "linear"
    elif "rotaryembedding" in name:
        kind = "rotary"
    elif isinstance(module, torch.nn.Embedding) or name.endswith("embedding"):
        kind = "embedding"
    elif "norm" in name:
        kind = "rms_norm" if "rms" in name else "layer_norm"
    elif "activation" in home.rpartition(".")[2]:
        kind = "activation"
    elif any(True for _ in module.parameters(recurse=False)):
        kind = cls.__name__
    else:
        return None
    return ContractPart(kind, _named(cls))


def _home(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _named(cls: type) -> str:
    return f"{cls.__name__} of {_home(cls)}"


#: Packages whose classes only put parts together; those of `model_check` were gone through.
_COMPOSING = ("accelerate", "cute_kernels", "deepspeed", "peft", "torch", "transformers", "vllm")


def described(
    model: torch.nn.Module,
    side: str,
    parts_of: Callable[[torch.nn.Module], tuple[ContractPart, ...]],
    class_of: Callable[[torch.nn.Module], type] = type,
    around: Callable[[torch.nn.Module, type], list | None] | None = None,
) -> dict[str, dict[str, str]]:
    """Return the fields ``formulas``, ``orders`` and ``settings`` of a contract.

    What the layers agree on stands once; else each value has the numbers of its layers.

    Args:
        model: A trainer's or an engine's.
        side: ``"trainer"`` or ``"engine"``: whose words `model_settings` reads.
        parts_of: Function that returns the parts of a module.
        class_of: Function that returns the class that a module's author wrote.
        around: Function that returns what a module's own forward puts around that of its class, or
            None: it does not call it.  None: which is not known.
    """
    hooks = foreign_calls.foreign_global()
    formulas = [Stated("hooks", f"every module: {hook.text}", None) for hook in hooks]
    orders: list[Stated] = []
    settings: list[Stated] = []
    count = 0
    for path, module in model_settings.located(model):
        layer, cls = model_settings.layer_of(path), class_of(module)
        count = max(count, 0 if layer is None else layer + 1)
        settings += model_settings.settings_of(path, module, side)
        parts = parts_of(module)
        opaque = _home(cls) not in _COMPOSING or isinstance(module, torch.jit.ScriptModule)
        if not parts and opaque:
            parts = (ContractPart(cls.__name__, _named(cls)),)
        for part in _with_own_forward(module, cls, parts, around):
            for number in (layer,) if part.layers is None else part.layers:
                formulas.append(Stated(part.kind, part.formula, number))
                if part.order is not None:
                    orders.append(Stated(part.kind, part.order, number))
        for hook in foreign_calls.foreign(module):
            formulas.append(Stated("hooks", f"{cls.__name__}: {hook.text}", layer))
    if count:
        settings.append(Stated("layers", str(count), None))
    by_layer = model_settings.by_layer
    return {
        "formulas": by_layer(formulas),
        "orders": by_layer(orders),
        "settings": by_layer(settings, count),
    }


def _with_own_forward(
    module: torch.nn.Module, cls: type, parts: tuple[ContractPart, ...], around: Callable | None
) -> tuple[ContractPart, ...]:
    """Return the parts of a module with what a forward of its own does to them."""
    forward = vars(module).get("forward")
    if isinstance(module, torch.jit.ScriptModule):  # its code is its own, and has no class
        return parts
    if forward is None or (around is None and foreign_calls.is_known(forward)):
        return parts
    wrapped = None if around is None else around(module, cls)
    if wrapped is None:
        kind = parts[0].kind if parts else cls.__name__
        text = f"{_named(cls)}, forward by {foreign_calls.text_of(forward)}"
        return (ContractPart(kind, text),)
    foreign = [foreign_calls.text_of(f) for f in wrapped if not foreign_calls.is_known(f)]
    if not foreign:
        return parts
    parts = parts or (ContractPart(cls.__name__, _named(cls)),)
    inside = f", inside {' and '.join(sorted(foreign))}"
    return tuple(part._replace(formula=part.formula + inside) for part in parts)


def weights_text(weights: Manifest | int | None) -> str | None:
    """Return the field ``weights`` of a contract.

    Args:
        weights: Manifest of published weights: its version and the digest of its file; a version
            alone; or None.

    Raises:
        ArgumentTypeError: something else.  ArgumentValueError: a negative version.
    """
    if weights is None:
        return None
    if isinstance(weights, Manifest):
        return f"version {weights.version}, sha256 {weights.files[WEIGHTS]['sha256']}"
    if checking.integer("weights", weights, "a Manifest, a version, or None") < 0:
        raise ArgumentValueError(expected("weights", "a version of at least 0", weights))
    return f"version {weights}"


# ---- the engine's side --------------------------------------------------------------------------


def module_parts(module: torch.nn.Module, dtype: torch.dtype) -> tuple[ContractPart, ...]:
    """Return the parts that a module names in `PART`, or a foreign one, if it computes anything.

    dtype: of the model.
    """
    parts = getattr(module, PART, None) or getattr(getattr(module, "impl", None), PART, None)
    if callable(parts):
        parts = parts(dtype)
    parts = parts or foreign_part(module)
    if parts is None:
        return ()
    return (parts,) if isinstance(parts, ContractPart) else tuple(parts)


def engine_contract(
    model: torch.nn.Module,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype = torch.float32,
) -> Contract:
    """Return the contract of an engine's model.

    Args:
        model: Its modules say in `PART` what computes them; others count as the engine's own.
        device, dtype: None: those of the model's first floating-point parameter.
        logits_dtype: Of the logits that log-probs are made of.

    Raises:
        ArgumentTypeError: it is no module, or has no parameter and neither device nor dtype is
            given.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(expected("model", "a torch.nn.Module", type(model).__name__))
    if device is None or dtype is None:
        first = next((p for p in model.parameters() if p.dtype.is_floating_point), None)
        if first is None:
            raise ArgumentTypeError(expected("model", "a module with parameters", "none"))
        device, dtype = device or first.device, dtype or first.dtype
    fields = described(model, "engine", lambda module: module_parts(module, dtype))
    weights = weights_text(published.manifest_in_use(model))
    name = str(logits_dtype).removeprefix("torch.")
    fields |= {"logits_dtype": name, "weights": weights, "engine": engine_statement(model)}
    return of_device(device, None, dtype, **fields)


def worker_contract(worker: object) -> dict[str, object]:
    """Return the contract of one worker of vLLM as a plain dict: ``collective_rpc`` calls it.

    Args:
        worker: Has the model at ``model_runner.model``, or a ``get_model()``.

    Raises:
        ArgumentTypeError: no model is found in it.
    """
    model = worker_model(worker)
    logits_dtype = getattr(model, "cute_kernels_logits_dtype", torch.float32)
    return engine_contract(model, logits_dtype=logits_dtype).to_dict()


def engine_statement(model: torch.nn.Module) -> str | None:
    """Say which vLLM runs a model, and whether the plug-in does; None: it is no model of vLLM's."""
    vllm = sys.modules.get("vllm")
    if vllm is None:
        return None
    homes = {type(module).__module__ for module in model.modules()}
    if any(home.startswith(f"{__package__}.vllm.") for home in homes):
        from .vllm import releases

        return releases.statement()
    is_vllm = any(home.startswith("vllm.") for home in homes)
    return f"{STOCK} {vllm.__version__}" if is_vllm else None


def worker_model(worker: object) -> torch.nn.Module:
    """Return the model of a worker of vLLM or SGLang.

    Raises:
        ArgumentTypeError: none is found.
    """
    runner = getattr(worker, "model_runner", None)
    getters = [getattr(holder, "get_model", None) for holder in (worker, runner)]
    getter = next((g for g in getters if callable(g)), None)
    model = getattr(runner, "model", None) if getter is None else getter()
    if not isinstance(model, torch.nn.Module):
        want = "a worker with a model (model_runner.model or get_model())"
        raise ArgumentTypeError(expected("worker", want, type(worker).__name__))
    return model


class WorkerExtension:
    """Methods for vLLM's ``worker_extension_cls``, so that RPC can call them by name."""

    def cute_kernels_contract(self) -> dict[str, object]:
        """Return `worker_contract` of this worker."""
        return worker_contract(self)

    def cute_kernels_load_published(
        self, path: str, version: int | str, allow_older: bool = False
    ) -> dict[str, object]:
        """Give the model a version of published weights, in place, and return its description.

        vLLM keeps the keys and values of prompts that it saw: reset its prefix cache afterwards.

        Args, Raises: As `published.load_published`; an RPC over HTTP brings the version as text.
        """
        model = worker_model(self)
        reload, load = getattr(self, "reload_weights", None), getattr(model, "load_weights", None)
        check_filled = getattr(model, "cute_kernels_check_filled", lambda: None)

        def update(pairs):
            if reload is None:
                load(pairs)
            else:
                reload(weights_iterator=iter(pairs))
            check_filled()

        read = published.load_published(
            path,
            _version(version),
            model=model,
            update=update if reload or load else None,
            allow_older=allow_older,
        )
        return {"version": read.manifest.version, **read.manifest.files[WEIGHTS]}

    def cute_kernels_require_version(self, version: int | str) -> int:
        """Check that the model holds a version, before a rollout, and return it.

        Raises:
            ManifestError: it holds another one, or none.
        """
        number = _version(version)
        published.require_version(worker_model(self), number)
        return number


def _version(version: int | str) -> int:
    """Return a version that an RPC over HTTP may bring as text."""
    try:
        return int(version)
    except (TypeError, ValueError):
        raise ArgumentValueError(expected("version", "a number", repr(version))) from None


# ---- the trainer's side -------------------------------------------------------------------------


def require_engine(
    ours: Contract | Mapping[str, object], workers: Iterable[Mapping[str, object]]
) -> None:
    """Check the contracts of all workers of an engine: what ``collective_rpc`` returned.

    Args:
        ours: Contract of the trainer.
        workers: A contract, or the dict of one, for each worker.

    Raises:
        ContractError: a worker has another; the message names the worker and what differs.
        ArgumentValueError: there is no worker.
    """
    count = 0
    for number, theirs in enumerate(workers):
        count += 1
        try:
            compare_contracts(ours, theirs)
        except ContractError as error:
            stated = theirs.get("engine") if isinstance(theirs, Mapping) else theirs.engine
            if str(stated).startswith(STOCK):
                want = "one that runs the plug-in (CUTE_KERNELS_VLLM=1 or additional_config, and no"
                error = expected("engine", f"{want} VLLM_PLUGINS without it)", f"{stated}\n{error}")
            raise ContractError(f"worker {number}: {error}") from None
    if not count:
        raise ArgumentValueError(expected("workers", "the contract of at least one", "none"))
