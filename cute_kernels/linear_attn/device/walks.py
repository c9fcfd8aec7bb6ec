"""Configurations of walks over chunks."""

from dataclasses import dataclass

#: Rows of a chunk: config's DELTA_CHUNK, which a launcher checks.
ROWS = 64
#: Rows of a block of a chunk: config's DELTA_BLOCK.
BLOCK = 16


@dataclass(frozen=True)
class DeltaConfig:
    """One compiled kernel of the delta rule on SM90.

    keys: K; beta: dtype; initial, final: whether states come in and go out; stages: chunks whose
    loads are under way.
    """

    keys: int
    beta: str
    initial: bool
    final: bool
    stages: int = 3


@dataclass(frozen=True)
class DeltaGradientConfig(DeltaConfig):
    """One of its backward: whether gradients of states go out and come in."""


@dataclass(frozen=True)
class DeltaStepConfig:
    """One compiled kernel of decoding: K, V, and the dtype of β of new rows."""

    keys: int
    values: int
    beta: str
