"""Questions that the probes ask the card."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A fact about the card that decides a plan, and the probe that settles it."""

    number: int
    probe: str
    text: str
    decides: str


QUESTIONS = (
    Question(
        1,
        "width",
        "Are WGMMA bits the same for every instruction N (8..256), tile shape, and with operands "
        "swapped?",
        "whether M may choose the tile, and whether decode can share bits with prefill",
    ),
    Question(
        2,
        "zeros",
        "Do whole zero k16 groups leave bits unchanged, -0 included?",
        "whether K tails and token padding are neutral",
    ),
    Question(
        3,
        "model",
        "Does the truncation model predict every bit?",
        "whether a CPU oracle can check every output bit (golden vectors)",
    ),
    Question(
        4,
        "promotion",
        "What do fp32 promotion points cost?",
        "whether `chain` and `tree` can be one contract",
    ),
    Question(
        5,
        "instruction",
        "Are the bits of WGMMA with A from registers, of mma.sync and of Triton's tl.dot those of "
        "WGMMA from shared memory?",
        "whether decode may take another instruction than prefill, and Triton than CuTe",
    ),
    Question(
        6,
        "exp2",
        "Has 2^x one value in CuTe's and in Triton's kernels?",
        "whether kernels of both may share decays",
    ),
)
MIN_OUTPUTS = 10_000_000  # a probe's answer counts from this many compared outputs
