"""Sequences in key buffers on a card: python -m tests.sparse_attn.gpu_sequences

Padding on either side with gradients, packs, caches that drop keys; prints "ok" at the end.
"""

from __future__ import annotations

from tests.contract import same_bytes
from tests.sparse_attn import sequence_cases as known


def main() -> None:
    known.DEVICE = "cuda"
    for pad in (1, 20, 127, 128):
        first, second = known.behind((pad, pad + known.S - 137), (known.S, 137), pad + known.S)
        require(f"padding {pad}", known.differing(first, known.alone(known.S)))
        require(f"padding {pad}, short", known.differing(second, known.alone(137, seed=2)))
    for cut, window in ((60, None), (64, None), (127, None), (128, None), (60, 40)):
        require(f"pack at {cut}, window {window}", known.differing(*known.packed(cut, window)))
    for window, pad in ((64, 0), (64, 20), (64, 127), (200, 1)):
        found = known.cached(window, pad, known.CHUNKS)
        want = known.alone(known.CACHED, window=window)[0]
        require(f"window {window} behind {pad}", [] if same_bytes(found, want) else ["out"])
    print("ok")


def require(what: str, differing: list[str]) -> None:
    """Prints a case, and fails if any of its tensors differ."""
    print(what, differing or "same bytes", flush=True)
    assert not differing, what


if __name__ == "__main__":
    main()
