"""Which formula a module computes, found by running its forward on random inputs.

Names prove nothing: a class called RMSNorm may add one to its weight, or take its eps outside of
the root.  So a norm is replaced if its own forward, with random weights in its parameters' places,
agrees with a formula of ours on inputs at which every other formula would differ.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import ArgumentValueError
from . import patch_rotary

#: Of results near 1: a float32 inside costs 1e-6, another formula or eps at least 1e-2.
_TOLERANCE = 3e-5
#: Inputs: about as large as the root of an eps, and far from it; all with a mean that shows.
_SIZES = (3e-4, 3e-3, 1.0, 30.0)
_ROWS = 4


class NormRule(NamedTuple):
    """A norm's formula: ``kind`` is ``rms_norm`` or ``layer_norm``; names of its parameters."""

    kind: str
    eps: float
    offset: float
    weight: str | None
    bias: str | None


class RotaryRule(NamedTuple):
    """A rotary table's: whether it has the dtype of its input, or fp32 always."""

    follows: bool


def is_norm_like(module: torch.nn.Module) -> bool:
    """Whether a module could be a norm over the last dimension: no children, vectors of one D."""
    if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
        return True
    shapes = {_shape(p) for p in module.parameters(recurse=False)}
    alone = not module._modules and not any(True for _ in module.buffers(recurse=False))
    return alone and len(shapes) == 1 and len(next(iter(shapes))) == 1 and _takes_one(module)


def norm_rule(module: torch.nn.Module) -> NormRule | str:
    """The formula of a norm; or, in words, why there is none."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    width = _width(module)
    if others := _optional(module):
        return f"its forward also takes {', '.join(others)}"
    if width is None:
        return "it is not over the last dimension alone"
    if len(names) > 2:
        return f"it has {len(names)} parameters"
    try:
        probe = _Probe(module, width)
        found = [rule for rule in _rules(module, names) if probe.agrees(rule)]
    except Exception as error:  # any code may run here, and fail as it likes
        return f"its forward does not run on a random input ({type(error).__name__}: {error})"
    return found[0] if found else "its forward agrees with no formula of ck.rms_norm or layer_norm"


def _shape(parameter: torch.Tensor) -> tuple[int, ...]:
    # ZeRO-3 leaves an empty tensor in place of the parameter.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _takes_one(module: torch.nn.Module) -> bool:
    """Whether a forward can be called with one tensor."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return len([p for p in needed if p.kind != p.VAR_POSITIONAL]) == 1


def _optional(module: torch.nn.Module) -> list[str]:
    """Arguments that a forward may be given besides its first, as the gate of Mamba-2's norm."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [p.name for p in parameters if p.default is not p.empty]


def _width(module: torch.nn.Module) -> int | None:
    """D, if the module norms one dimension."""
    normalized = getattr(module, "normalized_shape", None)
    if normalized is not None:
        return int(normalized[0]) if len(normalized) == 1 else None
    return _shape(next(module.parameters(recurse=False)))[0]


def _rules(module: torch.nn.Module, names: list[str]) -> list[NormRule]:
    """Every formula with an eps that the module holds, and its parameters in every role."""
    held = vars(module).values()
    epsilons = {v for v in held if isinstance(v, float) and 0.0 <= v < 0.1}
    if getattr(module, "eps", 0.0) is None:  # nn.RMSNorm: that of fp32, in which it computes
        epsilons.add(torch.finfo(torch.float32).eps)
    roles = {0: [(None, None)], 1: [(names[0], None)] if names else []}.get(len(names))
    if roles is None:
        roles = [tuple(names), tuple(reversed(names))]
    found = []
    for eps in sorted(epsilons):
        for weight, bias in roles:
            offsets = (0.0, 1.0) if weight else (0.0,)
            found += [NormRule("layer_norm", eps, 0.0, weight, bias)]
            found += [NormRule("rms_norm", eps, o, weight, None) for o in offsets if not bias]
    return found


class _Probe:
    """A module with random parameters on the CPU, run on random inputs: [ROWS, D], and others."""

    def __init__(self, module: torch.nn.Module, width: int) -> None:
        generator = torch.Generator(device="cpu").manual_seed(width)
        self.module, self.values = _with_random_parameters(module, generator)
        self.results = []
        for at, size in enumerate(_SIZES):
            shape = (_ROWS, width) if at % 2 else (2, 1, 3, width)
            x = _random(shape, generator)
            x = (x + _random((*shape[:-1], 1), generator)) * size
            with torch.no_grad():
                y = type(module).forward(self.module, x)
            self.results.append((x, y))

    def agrees(self, rule: NormRule) -> bool:
        """Whether every result is that of the formula."""
        return all(
            isinstance(y, torch.Tensor)
            and y.shape == x.shape
            and bool(((y.double() - self._formula(rule, x)).abs() <= _TOLERANCE).all())
            for x, y in self.results
        )

    def _formula(self, rule: NormRule, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float64)
        if rule.kind == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + rule.eps).sqrt()
        if rule.weight is not None:
            y = y * (self.values[rule.weight].to(torch.float64) + rule.offset)
        return y if rule.bias is None else y + self.values[rule.bias].to(torch.float64)


def _with_random_parameters(
    module: torch.nn.Module, generator: torch.Generator
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A shallow copy on the CPU, so that sharded, frozen or unmade parameters do not matter."""
    probe = copy.copy(module)
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


def activation(module: torch.nn.Module, candidates: dict[str, Callable]) -> str | None:
    """The name of the function that a module computes, of those given; None: another one."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = _random((8, 256), generator) * 3
    try:
        with torch.no_grad():
            y = type(module).forward(module, x)
    except Exception:  # any code may run here, and fail as it likes
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    near = ((y.double() - function(x.double())).abs().max() for function in candidates.values())
    return next((n for n, gap in zip(candidates, near, strict=True) if float(gap) <= 1e-5), None)


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
    return "position_ids" in inspect.signature(type(module).forward).parameters


def rotary_rule(module: torch.nn.Module) -> RotaryRule | str:
    """How a rotary module makes its table; or, in words, why it is left."""
    kinds = getattr(module, "rope_type", "default")
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    for kind in kinds.values():
        if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
            return f"rope_type {kind!r}: its frequencies follow the longest sequence of the batch"
    try:
        patch_rotary.exact_frequencies(module)
    except ArgumentValueError as error:
        return str(error)
    try:
        dtypes = {_rotary_dtype(module, layer_type) for layer_type in kinds}
    except Exception as error:  # any code may run here, and fail as it likes
        return f"its forward does not run on random positions ({type(error).__name__}: {error})"
    if dtypes <= {torch.bfloat16} or dtypes <= {torch.float32}:
        return RotaryRule(follows=torch.bfloat16 in dtypes)
    return "its forward agrees with no formula of ck.rotary_table"


def _rotary_dtype(module: torch.nn.Module, layer_type: str | None) -> torch.dtype | None:
    """The dtype of a table asked for with a bf16 input; None: it is not the formula's."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    of_layer = () if layer_type is None else (layer_type,)
    generator = torch.Generator(device="cpu").manual_seed(1)
    probe = copy.copy(module)
    held = getattr(module, f"{prefix}inv_freq")
    # Frequencies of its own: the model's may not be made yet.
    frequencies = torch.rand(held.shape, generator=generator, dtype=torch.float32, device="cpu")
    vars(probe)["_buffers"] = {**module._buffers, f"{prefix}inv_freq": frequencies}
    positions = torch.randint(0, 4096, (2, 9), generator=generator, device="cpu")
    angles = (positions[..., None] * frequencies).to(torch.float64)
    angles = torch.cat((angles, angles), dim=-1)
    scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    want = angles.cos() * scaling, angles.sin() * scaling
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        x = torch.zeros(1, dtype=dtype, device="cpu")
        with torch.no_grad():
            got = type(module).forward(probe, x, positions, *of_layer)
        for table, exact in zip(got, want, strict=True):
            near = table.shape == exact.shape
            if not near or float((table.double() - exact).abs().max()) > bound * max(1, scaling):
                return None
    mixes = _mixes_sections(probe, frequencies, scaling, positions, of_layer)
    return None if mixes else got[0].dtype


def _mixes_sections(
    probe, frequencies: torch.Tensor, scaling: float, positions: torch.Tensor, of_layer: tuple
) -> bool:
    """Whether a forward makes one table of positions [3, B, T], as Qwen2-VL's does."""
    sections = torch.stack((positions, positions + 5, positions + 11))
    x = torch.zeros(1, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad():
            table = type(probe).forward(probe, x, sections, *of_layer)[0]
    except Exception:  # any code may run here, and most takes no such positions
        return False
    angles = (sections[..., None] * frequencies).to(torch.float64)
    want = torch.cat((angles, angles), dim=-1).cos()
    return table.shape != want.shape or float((table - want * scaling).abs().max()) > 1e-3
