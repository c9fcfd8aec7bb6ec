"""Identify the formula of a module by running its forward on random inputs.

Names prove nothing: a class called RMSNorm may add one to its weight, or take its eps outside of
the root.  So a norm is replaced if its own forward, with random weights in its parameters' places,
agrees with a formula of ours on inputs at which every other formula would differ.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ....errors import ArgumentValueError
from ..checks import Absent
from ..classes import user_class
from ..forwards import rotary

#: Bounds for results near 1: fp32 inside costs 1e-6, another formula or eps at least 1e-2.
_TOLERANCE = 3e-5
#: Inputs: about as large as the root of an eps, and far from it; all with a mean that shows.
_SIZES = (3e-4, 3e-3, 1.0, 30.0)
_ROWS = 4


#: Start of the reason why a module is left though its results are those of a formula.
A_NORM_THAT = "a norm whose forward reads"
#: Attributes of every module.
_OF_ANY_MODULE = frozenset(dir(torch.nn.Module())) | {"__class__", "__dict__"}
#: Values that can be compared later, with tuples, lists and dicts of them.
_COMPARED = (bool, int, float, str, torch.dtype, types.FunctionType, types.BuiltinFunctionType)

#: Types of attributes that `Alike` compares.
_PLAIN = (bool, int, float, str, type(None), torch.dtype)

#: Attributes that a forward reads, and their values: with others the formula may not hold.
Reads = tuple[tuple[str, object], ...]


class NormRule(NamedTuple):
    """A norm's formula: ``kind`` is ``rms_norm`` or ``layer_norm``; names of its parameters.

    eps_name: The attribute that holds eps; None: it is a constant in the code.
    reads: The other attributes that the forward reads.
    """

    kind: str
    eps: float
    offset: float
    weight: str | None
    bias: str | None
    eps_name: str | None = None
    reads: Reads = ()


class ActivationRule(NamedTuple):
    """The name of an activation's function, and the attributes that its forward reads."""

    kind: str
    reads: Reads


class RotaryRule(NamedTuple):
    """Rule of a rotary table: whether it has the dtype of its input, or fp32 always."""

    follows: bool
    reads: Reads = ()


class Alike:
    """Rules of modules, one for those of one class, plain attributes and shapes of parameters."""

    def __init__(self) -> None:
        self._rules: dict[tuple, object] = {}

    def rule(self, find: Callable[[torch.nn.Module], object], module: torch.nn.Module) -> object:
        """Return ``find(module)``, or what it returned for a module that is alike."""
        likeness = _likeness(module)
        if likeness is None:
            return find(module)
        key = find, *likeness
        if key not in self._rules:
            self._rules[key] = find(module)
        return self._rules[key]


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


def is_norm_like(module: torch.nn.Module) -> bool:
    """Whether a module could be a norm over the last dimension: no children, vectors of one D."""
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    shapes = {_shape(p) for p in module.parameters(recurse=False)}
    alone = not module._modules and not any(True for _ in module.buffers(recurse=False))
    return alone and len(shapes) == 1 and len(next(iter(shapes))) == 1 and _takes_one(module)


def norm_rule(module: torch.nn.Module) -> NormRule | str:
    """Return the formula of a norm, or a reason why there is none."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    width = _width(module)
    if extra_arguments := _optional(module):
        return f"its forward also takes {', '.join(extra_arguments)}"
    if width is None:
        return "it is not over the last dimension alone"
    if len(names) > 2:
        return f"it has {len(names)} parameters"
    try:
        probe = _Probe(module, width)
        results = probe.results()
        matches = [rule for rule in _rules(module, names) if probe.agrees(rule, results)]
    except Exception as error:  # any code may run here, and fail as it likes
        return f"its forward does not run on a random input ({type(error).__name__}: {error})"
    if not matches:
        return "its forward agrees with no formula of ck.rms_norm or layer_norm"
    return _with_reads(matches[0], module, probe)


def _with_reads(rule: NormRule, module: torch.nn.Module, probe: _Probe) -> NormRule | str:
    """Return the rule with the attributes that the forward reads, or why the module is left."""
    eps_name, reads = None, []
    for name, value in _values(module, probe.names):
        if not _can_compare(value):
            return f"{A_NORM_THAT} {name}, a {type(value).__name__}, which may change"
        eps = torch.finfo(torch.float32).eps if value is None else value
        if eps_name is None and type(eps) is float and eps == rule.eps:
            other_eps = [eps * 8, eps / 8] if eps else [1e-3]
            if all(
                probe.still(rule._replace(eps=candidate), name, candidate)
                for candidate in other_eps
            ):
                eps_name = name
                continue
        if isinstance(value, bool) and probe.still(rule, name, not value):
            continue
        reads.append((name, copy.deepcopy(value)))
    return rule._replace(eps_name=eps_name, reads=tuple(reads))


# ---- what a forward reads -----------------------------------------------------------------------


def _recorder(module: torch.nn.Module, names: set[str]) -> torch.nn.Module:
    """Make a shallow copy that records the names of its attributes that a forward reads."""
    cls = user_class(module)

    def recorded(self, name: str) -> object:
        if name not in _OF_ANY_MODULE and not name.startswith("_cute_kernels"):
            names.add(name)
        return cls.__getattribute__(self, name)

    probe = copy.copy(module)
    probe.__class__ = type(cls.__name__, (cls,), {"__getattribute__": recorded})
    return probe


def _values(module: torch.nn.Module, names: set[str]) -> Iterator[tuple[str, object]]:
    """Yield the attributes that are values: no parameters, children, methods or properties."""
    registered = {**module._parameters, **module._buffers, **module._modules}
    for name in sorted(names - set(registered)):
        static = inspect.getattr_static(module, name, Absent)
        if name in vars(module) or static is Absent or _can_compare(static):
            function = isinstance(static, types.FunctionType) and name not in vars(module)
            if not function:
                yield name, static


def _can_compare(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_can_compare, value))
    if isinstance(value, dict):
        return all(map(_can_compare, (*value, *value.values())))
    return value is None or value is Absent or isinstance(value, _COMPARED)


def _reads(module: torch.nn.Module, names: set[str], but: tuple[str, ...] = ()) -> Reads:
    values = [(name, value) for name, value in _values(module, names) if _can_compare(value)]
    return tuple((name, copy.deepcopy(value)) for name, value in values if name not in but)


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _takes_one(module: torch.nn.Module) -> bool:
    """Whether a forward can be called with one tensor."""
    try:
        parameters = list(inspect.signature(user_class(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return len([p for p in required if p.kind != p.VAR_POSITIONAL]) == 1


def _optional(module: torch.nn.Module) -> list[str]:
    """Return the optional arguments of a forward, such as the gate of Mamba-2's norm."""
    parameters = list(inspect.signature(user_class(module).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.default is not p.empty]


def _width(module: torch.nn.Module) -> int | None:
    """Return D if the module norms one dimension, else None."""
    normalized = getattr(module, "normalized_shape", None)
    if normalized is not None:
        return int(normalized[0]) if len(normalized) == 1 else None
    return _shape(next(module.parameters(recurse=False)))[0]


def _rules(module: torch.nn.Module, names: list[str]) -> list[NormRule]:
    """Return every formula with an eps that the module holds, and its parameters in every role."""
    values = vars(module).values()
    epsilons = {v for v in values if isinstance(v, float) and 0.0 <= v < 0.1}
    if getattr(module, "eps", 0.0) is None:  # nn.RMSNorm: that of fp32, in which it computes
        epsilons.add(torch.finfo(torch.float32).eps)
    roles = {0: [(None, None)], 1: [(names[0], None)] if names else []}.get(len(names))
    if roles is None:
        roles = [tuple(names), tuple(reversed(names))]
    rules = []
    for eps in sorted(epsilons):
        for weight, bias in roles:
            offsets = (0.0, 1.0) if weight else (0.0,)
            rules += [NormRule("layer_norm", eps, 0.0, weight, bias)]
            rules += [NormRule("rms_norm", eps, o, weight, None) for o in offsets if not bias]
    return rules


class _Probe:
    """A module with random parameters on the CPU, run on random inputs: [ROWS, D], and others.

    names: of the attributes that its forward has read.
    """

    def __init__(self, module: torch.nn.Module, width: int) -> None:
        generator = torch.Generator(device="cpu").manual_seed(width)
        self.names: set[str] = set()
        self.module, self.values = _with_random_parameters(module, generator, self.names)
        self.forward = user_class(module).forward
        self.inputs = []
        for index, size in enumerate(_SIZES):
            shape = (_ROWS, width) if index % 2 else (2, 1, 3, width)
            x = _random(shape, generator)
            self.inputs.append((x + _random((*shape[:-1], 1), generator)) * size)

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (x, y) for each input, in training and in evaluation."""
        return [
            (x, y)
            for x in self.inputs
            for y in _in_both_modes(self.module, lambda m, x=x: self.forward(m, x.clone()))
        ]

    def agrees(self, rule: NormRule, results: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether every result is that of the formula."""
        return all(
            isinstance(y, torch.Tensor)
            and y.shape == x.shape
            and bool(((y.double() - self._formula(rule, x)).abs() <= _TOLERANCE).all())
            for x, y in results
        )

    def still(self, rule: NormRule, name: str, value: object) -> bool:
        """Whether the rule holds where an attribute has another value."""
        names, before = set(self.names), vars(self.module).get(name, Absent)
        vars(self.module)[name] = value
        try:
            return self.agrees(rule, self.results())
        except Exception:  # any code may run here, and fail as it likes
            return False
        finally:
            self.names.intersection_update(names)
            vars(self.module).pop(name)
            if before is not Absent:
                vars(self.module)[name] = before

    def _formula(self, rule: NormRule, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float64)
        if rule.kind == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        if rule.weight is not None:
            y = y * (self.values[rule.weight].to(torch.float64) + rule.offset)
        return y if rule.bias is None else y + self.values[rule.bias].to(torch.float64)


def _in_both_modes(probe: torch.nn.Module, call: Callable) -> list:
    """Call a module in training and in evaluation mode; torch's generator is restored."""
    results = []
    for training in (True, False):
        vars(probe)["training"] = training
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            results.append(call(probe))
    return results


def _with_random_parameters(
    module: torch.nn.Module, generator: torch.Generator, names: set[str]
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Make a shallow copy on the CPU with random parameters: sharded ones are not read."""
    probe = _recorder(module, names)
    values = {
        name: _random(_shape(p), generator) for name, p in module.named_parameters(recurse=False)
    }
    parameters = {
        name: torch.nn.Parameter(values[name], requires_grad=False) if name in values else None
        for name in module._parameters
    }
    vars(probe)["_parameters"] = parameters
    return probe, values


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


# ---- activations --------------------------------------------------------------------------------


def activation(module: torch.nn.Module, candidates: dict[str, Callable]) -> ActivationRule | None:
    """Return the name of the candidate that a module computes, or None."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    x, names = _random((8, 256), generator) * 3, set()
    probe, forward = _recorder(module, names), user_class(module).forward

    def kind() -> str | None:
        try:
            results = _in_both_modes(probe, lambda m: forward(m, x.clone()))
        except Exception:  # any code may run here, and fail as it likes
            return None
        if not all(isinstance(y, torch.Tensor) and y.shape == x.shape for y in results):
            return None
        exact = {name: function(x.double()) for name, function in candidates.items()}
        return next((n for n, e in exact.items() if all(_gap(y, e) <= 1e-5 for y in results)), None)

    kind_name = kind()
    if kind_name is None:
        return None
    reads = []
    for name, value in _reads(module, names):
        if isinstance(value, bool):
            vars(probe)[name] = not value
            unread = kind() == kind_name
            vars(probe)[name] = value
            if unread:
                continue
        reads.append((name, value))
    return ActivationRule(kind_name, tuple(reads))


def _gap(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).abs().max())


#: Name of our forward -> the function in torch, in float64.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


# ---- rotary tables ------------------------------------------------------------------------------


def is_rotary(module: torch.nn.Module) -> bool:
    """Whether a module makes cos and sin of positions: it holds frequencies and takes positions."""
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    if not any(name.endswith("inv_freq") for name in buffers):
        return False
    return "position_ids" in inspect.signature(user_class(module).forward).parameters


def rotary_rule(module: torch.nn.Module) -> RotaryRule | str:
    """Return the rule of a rotary module's table, or why the module is left."""
    kinds = getattr(module, "rope_type", "default")
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    for kind in kinds.values():
        if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
            return f"rope_type {kind!r}: its frequencies follow the longest sequence of the batch"
    try:
        rotary.exact_frequencies(module)
    except ArgumentValueError as error:
        return str(error)
    names: set[str] = set()
    try:
        dtypes = {_rotary_dtype(module, layer_type, names) for layer_type in kinds}
    except Exception as error:  # any code may run here, and fail as it likes
        return f"its forward does not run on random positions ({type(error).__name__}: {error})"
    if dtypes <= {torch.bfloat16} or dtypes <= {torch.float32}:
        scalings = [f"{kind}_attention_scaling" for kind in kinds if kind is not None]
        reads = _reads(module, names, but=("attention_scaling", *scalings))
        return RotaryRule(follows=torch.bfloat16 in dtypes, reads=reads)
    return "its forward agrees with no formula of ck.rotary_table"


def _rotary_dtype(
    module: torch.nn.Module, layer_type: str | None, names: set[str]
) -> torch.dtype | None:
    """Return the dtype of a table for a bf16 input; None: it is not the formula's."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    of_layer = () if layer_type is None else (layer_type,)
    generator = torch.Generator(device="cpu").manual_seed(1)
    probe, forward = _recorder(module, names), user_class(module).forward
    inv_freq = getattr(module, f"{prefix}inv_freq")
    # Random frequencies: those of the model may not be initialized yet.
    frequencies = torch.rand(inv_freq.shape, generator=generator, dtype=torch.float32, device="cpu")
    vars(probe)["_buffers"] = {**module._buffers, f"{prefix}inv_freq": frequencies}
    positions = torch.randint(0, 4096, (2, 9), generator=generator, device="cpu")
    angles = (positions[..., None] * frequencies).to(torch.float64)
    angles = torch.cat((angles, angles), dim=-1)
    scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    want = angles.cos() * scaling, angles.sin() * scaling
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        x = torch.zeros(1, dtype=dtype, device="cpu")
        tables = _in_both_modes(probe, lambda m, x=x: forward(m, x, positions, *of_layer))
        for results in tables:
            for table, exact in zip(results, want, strict=True):
                matches = table.shape == exact.shape
                if not matches or _gap(table, exact) > bound * max(1, scaling):
                    return None
    mixes = _mixes_sections(probe, frequencies, scaling, positions, of_layer)
    return None if mixes else results[0].dtype


def _mixes_sections(
    probe, frequencies: torch.Tensor, scaling: float, positions: torch.Tensor, of_layer: tuple
) -> bool:
    """Whether a forward makes one table of positions [3, B, T], as Qwen2-VL's does."""
    sections = torch.stack((positions, positions + 5, positions + 11))
    x = torch.zeros(1, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad():
            table = user_class(probe).forward(probe, x, sections, *of_layer)[0]
    except Exception:  # any code may run here, and most modules take no such positions
        return False
    angles = (sections[..., None] * frequencies).to(torch.float64)
    want = torch.cat((angles, angles), dim=-1).cos()
    return table.shape != want.shape or float((table - want * scaling).abs().max()) > 1e-3
