"""``ck.compile_options``: what torch.compile needs to keep the bytes of eager."""

from __future__ import annotations


def compile_options() -> dict[str, bool]:
    """Options of inductor for ``torch.compile(model, options=ck.compile_options())``.

    Ops of ours are opaque to inductor, but it fuses what torch computes between them (chains of
    residual additions, a scaled embedding, a rotary formula that is not known), and keeps float32
    where eager rounds to bf16 after each op.  ``emulate_precision_casts`` has it round there too;
    on a GPU it also forbids Triton to contract products and sums.

    Returns:
        A new dict, to which options of your own may be added.
    """
    return {"emulate_precision_casts": True}
