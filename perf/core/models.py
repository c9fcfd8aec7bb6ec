"""GPU models as the pages name them."""

from __future__ import annotations

#: The models of SM90 that the library is for; those of no record say so.
MODELS = ("H100", "H200")


def model(gpu: str) -> str:
    """The model that a device's name says: "H100" of "NVIDIA H100 80GB HBM3"; else the name."""
    return next((name for name in MODELS if name in gpu.split()), gpu)


def split(records: list[dict]) -> dict[str, list[dict]]:
    """GPU model -> its records, in the order of `models`; both models of SM90 always."""
    return {name: [r for r in records if model(r["gpu"]) == name] for name in models(records)}


def models(records: list[dict]) -> list[str]:
    """The columns of a table: both models, then every other card that has a record."""
    measured = {model(r["gpu"]) for r in records if r["gpu"] != "none"}
    return [*MODELS, *sorted(measured.difference(MODELS))]
