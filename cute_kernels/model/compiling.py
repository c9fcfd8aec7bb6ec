"""``ck.compile_options``: what torch.compile needs to keep the bytes of eager."""

from __future__ import annotations

from collections.abc import Sequence

#: What Dynamo calls the globals of this package's modules in guards.
_GLOBALS = f"G['__import_{__package__.partition('.')[0]}_dot_"


def compile_options() -> dict[str, object]:
    """Options of inductor for ``torch.compile(model, options=ck.compile_options())``.

    Ops of ours are opaque to inductor, but it fuses what torch computes between them (chains of
    residual additions, a scaled embedding, a rotary formula that is not known), and keeps float32
    where eager rounds to bf16 after each op.  ``emulate_precision_casts`` has it round there too;
    on a GPU it also forbids Triton to contract products and sums.  ``guard_filter_fn`` spares each
    call of a compiled model the guards on functions and constants of this package.

    Returns:
        A new dict, to which options of your own may be added.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> compiled = torch.compile(model, options=ck.compile_options())
    """
    return {"emulate_precision_casts": True, "guard_filter_fn": keep_guards}


def keep_guards(entries: Sequence) -> list[bool]:
    """Keep all guards of a graph but those on globals of this package.

    They are its functions, classes, modules and constants, which nothing changes; a patched model
    of 8 layers has 3,600 of them.  Guards on a model, its options and torch's state stay.
    """
    return [not entry.name.startswith(_GLOBALS) for entry in entries]
