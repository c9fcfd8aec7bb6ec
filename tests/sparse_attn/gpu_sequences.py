"""Sequences in key buffers on a card: python -m tests.sparse_attn.gpu_sequences

Padding on either side with gradients, packs, caches that drop keys; spans that the kernel reads, a
CUDA graph of decoding steps among them.  Prints "ok" at the end.
"""

from __future__ import annotations

import torch

from cute_kernels.sparse_attn import api
from cute_kernels.sparse_attn.config import VALUE_DIMS
from tests.contract import same_bytes
from tests.sparse_attn import sequence_cases as known

COLUMNS, PROMPT, STEPS = 700, 131, 5
PADS = (0, 1, 60, 128, 130)


def main() -> None:
    known.DEVICE = "cuda"
    for pad in (1, 20, 127, 128):
        first, second = known.behind((pad, pad + known.S - 137), (known.S, 137), pad + known.S)
        require(f"padding {pad}", known.differing(first, known.alone(known.S)))
        require(f"padding {pad}, short", known.differing(second, known.alone(137, seed=2)))
    for cut, window in ((60, None), (64, None), (127, None), (128, None), (60, 40)):
        require(f"pack at {cut}, window {window}", known.differing(*known.packed(cut, window)))
    for window, pad in ((64, 0), (64, 20), (64, 127), (200, 1)):
        out = known.cached(window, pad, known.CHUNKS)
        want = known.alone(known.CACHED, window=window)[0]
        require(f"window {window} behind {pad}", [] if same_bytes(out, want) else ["out"])
    for dim in VALUE_DIMS:
        graph_of_decoding(dim)
    print("ok")


@torch.no_grad()
def graph_of_decoding(dim: int) -> None:
    """A static cache, left padding: spans on the card, on the CPU, and steps of one CUDA graph."""
    generator = torch.Generator(device="cuda").manual_seed(dim)
    fresh = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    batch = len(PADS)
    k, v = (torch.randn(batch, COLUMNS, 2, n, **fresh) for n in (dim, VALUE_DIMS[dim]))
    real = torch.arange(COLUMNS, device="cuda") >= torch.tensor(PADS, device="cuda")[:, None]

    def attend(q: torch.Tensor, offset: int | torch.Tensor, device: str) -> torch.Tensor:
        sizes = (batch, q.shape[1], COLUMNS)
        spans = api.kv_ranges(None, real, offset, 0, sizes, packed=False, device=device)
        return api.sequence_attention(q, k, v, spans)

    prompt = torch.randn(batch, PROMPT, 8, dim, **fresh)
    both = [attend(prompt, 0, device) for device in ("cuda", "cpu")]
    require(f"spans on the card, D = {dim}", [] if same_bytes(*both) else ["out"])
    queries = torch.randn(STEPS, batch, 1, 8, dim, **fresh)
    query, position = queries[0].clone(), torch.full((), PROMPT, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend(query, position, "cuda")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed_results = attend(query, position, "cuda")
    for step in range(STEPS):
        query.copy_(queries[step])
        position.fill_(PROMPT + step)
        graph.replay()
        want = attend(queries[step], PROMPT + step, "cpu")
        require(
            f"step {step} of a graph, D = {dim}",
            [] if same_bytes(packed_results, want) else ["out"],
        )


def require(what: str, differing: list[str]) -> None:
    """Prints a case, and fails if any of its tensors differ."""
    print(what, differing or "same bytes", flush=True)
    assert not differing, what


if __name__ == "__main__":
    main()
