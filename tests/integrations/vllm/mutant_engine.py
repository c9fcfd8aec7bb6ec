"""`engine` with a mixture of experts that is not the trainer's: the bit tests have to see it.

    python -m tests.integrations.vllm.mutant_engine MUTANT FOLDER OUT CASE...

Sums in another order differ in fp32's last bit, which bf16 hides from most log-probs: they are
killed in fp32, by tests/integrations/test_engine_layers.py.
"""

from __future__ import annotations

import os
import sys

import torch

from cute_kernels.integrations import engine_layers
from cute_kernels.moe import api as moe
from tests.integrations.vllm import engine


def combine_rounded_products(rows, weights, permutation) -> torch.Tensor:
    """Round each product to the dtype of the model, as transformers' own experts do."""
    slots = zip(permutation.positions.unbind(1), weights.unbind(1), strict=True)
    return sum((rows[p.long()] * w[:, None]).to(rows.dtype) for p, w in slots)


def weights_in_another_dtype(logits, k, rule):
    """Round weights that stay in fp32, and keep those that are rounded."""
    return _route(logits, k, rule._replace(rounded=not rule.rounded))


_route = engine_layers.route
#: Name -> (module, function that is replaced, its replacement).
MUTANTS = {
    "combine_rounded_products": (moe, "combine", combine_rounded_products),
    "weights_in_another_dtype": (engine_layers, "route", weights_in_another_dtype),
}


def main() -> None:
    """Replace one function, and run the cases of the command line."""
    module, name, function = MUTANTS[sys.argv.pop(1)]
    setattr(module, name, function)
    engine.main()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's process is not what is tested
