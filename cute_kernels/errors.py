"""Every exception of the library and every message template.

An error names the argument, what was expected and what came.  Classes derive from the built-in
that a Python user would catch: ``ValueError`` for a wrong value or shape, ``TypeError`` for a wrong
type or dtype, ``RuntimeError`` for a machine that cannot do what was asked.
"""

from __future__ import annotations

import difflib


class CuteKernelsError(Exception):
    """The base of every exception that this library raises on purpose."""


class ShapeError(CuteKernelsError, ValueError):
    """A rank, a size, or two sizes that must agree."""


class DtypeError(CuteKernelsError, TypeError):
    """A dtype that is unsupported, or two dtypes that must agree."""


class ArgumentTypeError(CuteKernelsError, TypeError):
    """An argument that is not of the type the function takes (a list for a tensor, say)."""


class ArgumentValueError(CuteKernelsError, ValueError):
    """An option whose value is not one of those there are."""


class DeviceError(CuteKernelsError, ValueError):
    """Tensors on different devices."""


class RankError(CuteKernelsError, ValueError):
    """Arguments that the ranks of a group must have alike, or one that another rank refused."""


class AliasError(CuteKernelsError, ValueError):
    """A tensor that is written shares memory with one that is read."""


class BackendUnavailable(CuteKernelsError, RuntimeError):
    """No backend can run this op on this device; the message lists each one and why not."""


class NondeterministicError(CuteKernelsError, RuntimeError):
    """An unordered variant was asked for under ``torch.use_deterministic_algorithms(True)``."""


class NonfiniteError(CuteKernelsError, RuntimeError):
    """A norm that was to be finite is not (``error_if_nonfinite``)."""


class BatchVariantError(CuteKernelsError, RuntimeError):
    """An op whose bits follow the batch was called in ``batch_invariant(strict=True)``."""


class UnsupportedTransformError(CuteKernelsError, RuntimeError):
    """A ``torch.func`` transform that the op does not support."""


class CacheError(CuteKernelsError, RuntimeError):
    """The kernel cache folder cannot be trusted or used."""


class AotError(CuteKernelsError, RuntimeError):
    """A folder of ahead-of-time compiled kernels does not fit this machine or is damaged."""


class CertificateError(CuteKernelsError, RuntimeError):
    """A compiled kernel could not be disassembled or inspected."""


class LogpProviderUnavailable(CuteKernelsError, RuntimeError):
    """A request of vime that ``linear_logp`` cannot serve; its mode ``auto`` then takes its own."""

    linear_logp_provider_unavailable = True


class MissingPackageError(CuteKernelsError, RuntimeError):
    """A package that an extra of this library brings is not installed, or is too old."""


class GatherError(CuteKernelsError, RuntimeError):
    """A parameter that is kept in parts is not whole where it has to be read."""


class PatchError(CuteKernelsError, RuntimeError):
    """A model has parts whose bits follow the batch, and that no op of ours replaces."""


class ContractError(CuteKernelsError, RuntimeError):
    """Two sides that must agree on their bits run ops under other contracts."""


class ManifestError(CuteKernelsError, RuntimeError):
    """Published weights are damaged, not those that were asked for, or must not be replaced."""


class SettingError(CuteKernelsError, ValueError):
    """An environment variable of this library has a value that it does not take."""


class SettingWarning(UserWarning):
    """An environment variable looks like a setting of this library and is none."""


class MaskError(CuteKernelsError, ValueError):
    """A block mask that is not well formed."""


class MaskTypeError(CuteKernelsError, TypeError):
    """A block mask given in a type or dtype that is not taken."""


class ScheduleError(CuteKernelsError, ValueError):
    """A schedule that could deadlock, or that does not cover its mask."""


def expected(argument: str, want: str, got: object) -> str:
    """``"weight: expected 2 dimensions [N, K], got 3 (shape [4, 4, 4])"``."""
    return f"{argument}: expected {want}, got {got}"


def one_of(argument: str, choices, got: object) -> str:
    """``"order: expected one of 'chain', got 'tree'"``."""
    listed = ", ".join(repr(c) for c in choices)
    return expected(argument, f"one of {listed}", repr(got))


def nearest(argument: str, choices, got: str) -> str:
    """Message of `one_of` with the choices that resemble the value, or all if none does."""
    return one_of(argument, difflib.get_close_matches(got, choices, cutoff=0.5) or choices, got)


def missing(packages: list[str], extra: str) -> str:
    """``"needs matplotlib: pip install 'cute-kernels[demo]'"``."""
    return f"needs {' and '.join(packages)}: pip install 'cute-kernels[{extra}]'"


def no_backend(op: str, device: object, reasons: dict[str, str]) -> str:
    """One line per backend that was refused, and why."""
    lines = [f"{op}: no backend for {device}"]
    lines += [f"  {name}: {why}" for name, why in reasons.items()]
    return "\n".join(lines)
