"""transformers on a card: python -m tests.integrations.gpu_transformers; prints "ok" at the end.

The tests of its masks and caches on CUDA tensors, and one compiled model at several lengths.
"""

from __future__ import annotations

import torch

from cute_kernels.integrations import transformers as ours
from tests.integrations import cached as known


def main() -> None:
    ours.register()
    torch.set_default_device("cuda")
    true = known.tensors
    known.tensors = lambda *a, **b: [t.cuda() for t in on_cpu(true, *a, **b)]
    for kind in ("llama", "mistral"):
        for static in (False, True):
            for pad in (0, 1, 20, 127):
                known.prefill_and_decode_behind_padding(kind, pad, static)
        for cut in (60, 64, 127, 128):
            known.packs_through_position_ids(cut, kind)
        print(kind, "same bytes", flush=True)
    model = known.small("llama").cuda()
    run = torch.compile(model, fullgraph=True)
    ids = torch.randint(0, 97, (2, 300))
    with torch.no_grad():
        for length in (300, 280, 129, 64):
            want, got = (f(ids[:, :length], use_cache=False).logits for f in (model, run))
            assert (got - want).abs().max() < 2e-2 * want.abs().max(), length
    print("ok")


def on_cpu(function, *args, **kwargs):
    """``function`` with tensors made on the CPU, from its generators."""
    with torch.device("cpu"):
        return function(*args, **kwargs)


if __name__ == "__main__":
    main()
