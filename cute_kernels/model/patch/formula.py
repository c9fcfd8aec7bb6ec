"""Identify the formula of a module by running its forward on random inputs.

Names prove nothing: a class called RMSNorm may add one to its weight, or take its eps outside of
the root.  So a module is replaced if its own forward, with random tensors in its parameters'
places, agrees with a formula of ours on inputs at which every other formula would differ.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...errors import ArgumentValueError
from .report import Kind
from .state import Absent, Part, exact_frequencies, user_class

#: Bounds for results near 1: fp32 inside costs 1e-6, another formula or eps at least 1e-2.
_TOLERANCE = 3e-5
#: Inputs: about as large as the root of an eps, and far from it; all with a mean that shows.
_SIZES = (3e-4, 3e-3, 1.0, 30.0)
_ROWS = 4
#: Attributes of every module.
_OF_ANY_MODULE = frozenset(dir(torch.nn.Module())) | {"__class__", "__dict__"}
#: Values that can be compared later, with tuples, lists and dicts of them.
_COMPARED = (bool, int, float, str, torch.dtype, types.FunctionType, types.BuiltinFunctionType)
#: Types of attributes that `rule_of` compares.
_PLAIN = (bool, int, float, str, type(None), torch.dtype)

#: Activation of a norm's gate -> its formula.
_GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}

#: Attributes that a forward reads, and their values: with others the formula may not hold.
Reads = tuple[tuple[str, object], ...]


class Rule(NamedTuple):
    """A module's formula: the name of our forward; the others are as in `state.Notes`."""

    kind: str
    eps: float = 0.0
    offset: float = 0.0
    weight: str | None = None
    bias: str | None = None
    eps_name: str | None = None
    reads: Reads = ()
    follows: bool = True
    norm_before_gate: bool = True
    group_size: int | None = None
    activation: str = "silu"


class Refusal(NamedTuple):
    """Why a module has no rule; agrees: whether its results are nevertheless those of a formula."""

    text: str
    kind: Kind = Kind.NOT_TAKEN
    agrees: bool = False


def rule_of(part: Part, known: dict[tuple, Rule | Refusal]) -> Rule | Refusal | None:
    """Return the rule of a module, or why it has none; None: it is like no formula.

    known: Rules of modules by class, plain attributes and shapes; what is found is added.
    """
    _, module, cls = part
    if is_rotary(module):
        return rotary_rule(module)
    find = activation if is_activation(cls) else norm_rule
    if find is norm_rule and not (is_norm_like(module) or is_gated_norm_like(module)):
        return None
    likeness = _likeness(module)
    rule = known.get(likeness) or find(module)
    if likeness is not None:
        known[likeness] = rule
    if isinstance(rule, Refusal) and find is norm_rule and not rule.agrees:
        torchs = isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm)
        return rule if torchs or "norm" in cls.__name__.lower() else None
    return rule


def _likeness(module: torch.nn.Module) -> tuple | None:
    """Return what a module's forward may read, hashable; None: it holds more than that."""
    if module._modules or module._buffers:
        return None
    values = []
    for name, value in vars(module).items():
        if name.startswith("_cute_kernels") or (name in _OF_ANY_MODULE and name != "training"):
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if not all(type(part) in _PLAIN for part in parts):
            return None
        values.append((name, type(value), *map(type, parts), value))
    shapes = [(n, None if p is None else (p.shape, p.dtype)) for n, p in module._parameters.items()]
    return user_class(module), tuple(values), tuple(shapes)


# ---- a module that is run -----------------------------------------------------------------------


class _Probe:
    """A shallow copy of a module on the CPU, which records the attributes that its forward reads.

    names: of those attributes.  generator: of random tensors.
    """

    def __init__(self, module: torch.nn.Module, seed: int) -> None:
        cls = user_class(module)
        self.names = names = set()
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

        def recorded(self, name: str) -> object:
            if name not in _OF_ANY_MODULE and not name.startswith("_cute_kernels"):
                names.add(name)
            return cls.__getattribute__(self, name)

        self.module = copy.copy(module)
        self.module.__class__ = type(cls.__name__, (cls,), {"__getattribute__": recorded})
        self._forward = cls.forward

    def random(self, *shape: int) -> torch.Tensor:
        """Return normal numbers, fp32."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def __call__(self, *args: object) -> list:
        """Return the results in training and in evaluation; torch's generator is restored."""
        results = []
        for training in (True, False):
            vars(self.module)["training"] = training
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                copies = (a.clone() if isinstance(a, torch.Tensor) else a for a in args)
                results.append(self._forward(self.module, *copies))
        return results

    def holds(self, rule: Callable[[], bool], name: str, value: object) -> bool:
        """Whether a rule holds where an attribute has another value."""
        names, before = set(self.names), vars(self.module).get(name, Absent)
        vars(self.module)[name] = value
        try:
            return rule()
        except Exception:  # any code may run here, and fail as it likes
            return False
        finally:
            self.names.intersection_update(names)
            vars(self.module).pop(name)
            if before is not Absent:
                vars(self.module)[name] = before

    def values(self) -> Iterator[tuple[str, object]]:
        """Yield the attributes that are values: no parameters, children, methods or properties."""
        module = self.module
        registered = {**module._parameters, **module._buffers, **module._modules}
        for name in sorted(self.names - set(registered)):
            static = inspect.getattr_static(module, name, Absent)
            method = isinstance(static, types.FunctionType) and name not in vars(module)
            if (name in vars(module) or _can_compare(static)) and not method:
                yield name, static

    def reads(self, rule: Callable[[], bool] | None, but: tuple[str, ...] = ()) -> Reads:
        """Return the values that can be compared; not the flags without which the rule holds."""
        return tuple(
            (name, copy.deepcopy(value))
            for name, value in self.values()
            if name not in but
            and _can_compare(value)
            and not (rule and isinstance(value, bool) and self.holds(rule, name, not value))
        )


def _can_compare(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_can_compare, value))
    if isinstance(value, dict):
        return all(map(_can_compare, (*value, *value.values())))
    return value is None or value is Absent or isinstance(value, _COMPARED)


def _agree(results: list, exact: torch.Tensor, bound: float) -> bool:
    """Whether tensors have the shape of an exact one, and its numbers within a bound."""
    return all(
        isinstance(y, torch.Tensor)
        and y.shape == exact.shape
        and bool(((y.double() - exact).abs() <= bound).all())
        for y in results
    )


# ---- norms --------------------------------------------------------------------------------------


def is_norm_like(module: torch.nn.Module) -> bool:
    """Whether a module could be a norm over the last dimension: no children, vectors of one D."""
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    many = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p for p in _arguments(module) if p.default is p.empty and p.kind not in many]
    return len(needed) == 1 and _has_vectors_alone(module)


def is_gated_norm_like(module: torch.nn.Module) -> bool:
    """Whether a module could be a norm with a gate, forward(x, gate), and one vector."""
    names = [argument.name for argument in _arguments(module)]
    return len(module._parameters) == 1 and names[1:] == ["gate"] and _has_vectors_alone(module)


def _has_vectors_alone(module: torch.nn.Module) -> bool:
    """Whether a module holds vectors of one D and nothing else."""
    shapes = {_shape(p) for p in module.parameters(recurse=False)}
    alone = not module._modules and not any(True for _ in module.buffers(recurse=False))
    return alone and len(shapes) == 1 and len(next(iter(shapes))) == 1


def norm_rule(module: torch.nn.Module) -> Rule | Refusal:
    """Return the formula of a norm, or a reason why there is none."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    width, gated = _width(module), is_gated_norm_like(module)
    optional = [p.name for p in _arguments(module) if p.default is not p.empty]
    if optional and not gated:
        return Refusal(f"its forward also takes {', '.join(optional)}")
    if width is None:
        return Refusal("it is not over the last dimension alone")
    if len(names) > 2:
        return Refusal(f"it has {len(names)} parameters")
    try:
        norm = _Norm(module, width, gated)
        results = norm.results()
        matches = [rule for rule in _rules(module, names, gated) if norm.agrees(rule, results)]
    except Exception as error:  # any code may run here, and fail as it likes
        why = f"{type(error).__name__}: {error}"
        return Refusal(f"its forward does not run on a random input ({why})")
    if not matches:
        ops = "ck.gated_rms_norm" if gated else "ck.rms_norm or layer_norm"
        return Refusal(f"its forward agrees with no formula of {ops}")
    return norm.with_reads(matches[0])


class _Norm:
    """A norm with random parameters: inputs [ROWS, D], and others; gates of their shapes."""

    def __init__(self, module: torch.nn.Module, width: int, gated: bool) -> None:
        self._probe = probe = _Probe(module, width)
        parameters = module.named_parameters(recurse=False)
        # Sharded ones are not read.
        self._values = {name: probe.random(*_shape(p)) for name, p in parameters}
        vars(probe.module)["_parameters"] = {
            name: torch.nn.Parameter(self._values[name], requires_grad=False)
            if name in self._values
            else None
            for name in module._parameters
        }
        self._inputs = []
        for index, size in enumerate(_SIZES):
            shape = (_ROWS, width) if index % 2 else (2, *(() if gated else (1,)), 3, width)
            x = (probe.random(*shape) + probe.random(*shape[:-1], 1)) * size
            self._inputs.append((x, probe.random(*shape)) if gated else (x,))

    def results(self) -> list[list]:
        """Return the results for each input."""
        return [self._probe(*inputs) for inputs in self._inputs]

    def agrees(self, rule: Rule, results: list[list] | None = None) -> bool:
        """Whether every result is that of the formula."""
        results = self.results() if results is None else results
        return all(
            _agree(y, self._formula(rule, *(t.double() for t in inputs)), _TOLERANCE)
            for inputs, y in zip(self._inputs, results, strict=True)
        )

    def with_reads(self, rule: Rule) -> Rule | Refusal:
        """Return the rule with the attributes that the forward reads, or why there is none."""
        probe, eps_name = self._probe, None
        for name, value in probe.values():
            if not _can_compare(value):
                text = f"a norm whose forward reads {name}, a {type(value).__name__}, which"
                return Refusal(f"{text} may change", agrees=True)
            eps = torch.finfo(torch.float32).eps if value is None else value
            if eps_name is None and type(eps) is float and eps == rule.eps:
                others = [eps * 8, eps / 8] if eps else [1e-3]
                rules = [(rule._replace(eps=other), other) for other in others]
                if all(probe.holds(lambda r=r: self.agrees(r), name, e) for r, e in rules):
                    eps_name = name
        but = () if eps_name is None else (eps_name,)
        reads = probe.reads(lambda: self.agrees(rule), but)
        return rule._replace(eps_name=eps_name, reads=reads)

    def _formula(
        self, rule: Rule, x: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        if rule.kind == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        if gate is not None:
            gate = _GATES[rule.activation](gate)
        if gate is not None and not rule.norm_before_gate:
            x = x * gate
        groups = x.unflatten(-1, (-1, rule.group_size or x.shape[-1]))
        y = (groups / (groups.square().mean(-1, keepdim=True) + rule.eps).sqrt()).flatten(-2)
        if rule.weight is not None:
            y = y * (self._values[rule.weight].double() + rule.offset)
        if gate is not None and rule.norm_before_gate:
            y = y * gate
        return y if rule.bias is None else y + self._values[rule.bias].double()


def _rules(module: torch.nn.Module, names: list[str], gated: bool) -> list[Rule]:
    """Return every formula with an eps that the module holds, and its parameters in every role."""
    values = vars(module).values()
    epsilons = {v for v in values if isinstance(v, float) and 0.0 <= v < 0.1}
    if getattr(module, "eps", 0.0) is None:  # nn.RMSNorm: that of fp32, in which it computes
        epsilons.add(torch.finfo(torch.float32).eps)
    first, second = (*names, None, None)[:2]
    roles = [(first, second), (second, first)] if second else [(first, None)]
    if gated:
        return [
            Rule("gated_rms_norm", eps, 0.0, first, None, None, (), True, before, size, activation)
            for eps in sorted(epsilons)
            for before in (True, False)
            for size in _group_sizes(module)
            for activation in _GATES
        ]
    rules = []
    for eps in sorted(epsilons):
        for weight, bias in roles:
            offsets = (0.0, 1.0) if weight else (0.0,)
            rules += [Rule("layer_norm", eps, 0.0, weight, bias)]
            rules += [Rule("rms_norm", eps, o, weight) for o in offsets if not bias]
    return rules


def _group_sizes(module: torch.nn.Module) -> list[int | None]:
    """Return sizes of groups that a norm may have: an integer that it holds, or as many groups."""
    width, values = _width(module), vars(module).values()
    sizes = {v for v in values if type(v) is int and 1 < v < width and width % v == 0}
    return [None, *sorted(sizes | {width // v for v in sizes})]


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _arguments(module: torch.nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of a forward; none of one without a signature."""
    try:
        return list(inspect.signature(user_class(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []


def _width(module: torch.nn.Module) -> int | None:
    """Return D if the module norms one dimension, else None."""
    normalized = getattr(module, "normalized_shape", None)
    if normalized is not None:
        return int(normalized[0]) if len(normalized) == 1 else None
    return _shape(next(module.parameters(recurse=False)))[0]


# ---- activations --------------------------------------------------------------------------------

#: Name of our forward -> the function in torch, in float64.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


_ACTIVATION_CLASSES = {
    "SiLUActivation", "GELUActivation", "GELUTanh", "NewGELUActivation", "FastGELUActivation",
    "AccurateGELUActivation", "QuickGELUActivation",
}  # fmt: skip


def is_activation(cls: type) -> bool:
    """Whether a class is an activation of torch or transformers that a function of ours may be."""
    if cls in (torch.nn.SiLU, torch.nn.GELU, torch.nn.Tanh, torch.nn.Sigmoid):
        return True
    return cls.__module__ == "transformers.activations" and cls.__name__ in _ACTIVATION_CLASSES


def activation(module: torch.nn.Module) -> Rule | Refusal:
    """Return the function that a module computes, or that it is none of ours."""
    probe = _Probe(module, 0)
    x = probe.random(8, 256) * 3

    def kind() -> str | None:
        results = probe(x)
        exact = ((name, function(x.double())) for name, function in ACTIVATIONS.items())
        return next((name for name, y in exact if _agree(results, y, 1e-5)), None)

    try:
        name = kind()
    except Exception:  # any code may run here, and fail as it likes
        name = None
    if name is None:
        return Refusal("an activation of torch", Kind.NAMED)
    return Rule(name, reads=probe.reads(lambda: kind() == name))


# ---- rotary tables ------------------------------------------------------------------------------


def is_rotary(module: torch.nn.Module) -> bool:
    """Whether a module makes cos and sin of positions: it holds frequencies and takes positions."""
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    if not any(name.endswith("inv_freq") for name in buffers):
        return False
    return "position_ids" in [argument.name for argument in _arguments(module)]


def rotary_rule(module: torch.nn.Module) -> Rule | Refusal:
    """Return the rule of a rotary module's table, or why the module is left."""
    kinds = getattr(module, "rope_type", "default")
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    for kind in kinds.values():
        if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
            text = f"rope_type {kind!r}: its frequencies follow the longest sequence of the batch"
            return Refusal(text, Kind.SEQUENCES)
    try:
        exact_frequencies(module)
    except ArgumentValueError as error:
        return Refusal(str(error))
    try:
        dtypes, reads = set(), {}
        for layer_type in kinds:
            dtype, read = _rotary_dtype(module, layer_type)
            dtypes.add(dtype)
            reads |= read
    except Exception as error:  # any code may run here, and fail as it likes
        why = f"{type(error).__name__}: {error}"
        return Refusal(f"its forward does not run on random positions ({why})")
    if dtypes <= {torch.bfloat16} or dtypes <= {torch.float32}:
        reads = tuple(sorted(reads.items()))
        return Rule("rotary", reads=reads, follows=torch.bfloat16 in dtypes)
    return Refusal("its forward agrees with no formula of ck.rotary_table")


def _rotary_dtype(
    module: torch.nn.Module, layer_type: str | None
) -> tuple[torch.dtype | None, dict[str, object]]:
    """Return the dtype of a table for a bf16 input, and what is read; None: not the formula's."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    of_layer = () if layer_type is None else (layer_type,)
    probe, name = _Probe(module, 1), f"{prefix}inv_freq"
    # Random frequencies: those of the model may not be initialized yet.
    shape, generator = getattr(module, name).shape, probe.generator
    frequencies = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")
    vars(probe.module)["_buffers"] = {**module._buffers, name: frequencies}
    positions = torch.randint(0, 4096, (2, 9), generator=generator, device="cpu")
    scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))

    def agrees(tables: list, ids: torch.Tensor, bound: float) -> bool:
        angles = (ids[..., None] * frequencies).double()
        angles = torch.cat((angles, angles), dim=-1)
        pairs = zip(zip(*tables, strict=True), (angles.cos(), angles.sin()), strict=True)
        return all(_agree(ours, exact * scaling, bound * max(1, scaling)) for ours, exact in pairs)

    dtype = None
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        tables = probe(torch.zeros(1, dtype=dtype, device="cpu"), positions, *of_layer)
        if not agrees(tables, positions, bound):
            return None, {}
    dtype = tables[-1][0].dtype
    reads = dict(probe.reads(None, (f"{prefix}attention_scaling",)))
    # Qwen2-VL's makes one table of positions [3, B, T].
    sections = torch.stack((positions, positions + 5, positions + 11))
    try:
        tables = probe(torch.zeros(1, dtype=torch.float32, device="cpu"), sections, *of_layer)
    except Exception:  # any code may run here, and most modules take no such positions
        return dtype, reads
    return (dtype if agrees(tables, sections, 1e-3) else None), reads
