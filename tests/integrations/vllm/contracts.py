"""One process of vLLM: contracts of engines beside those of patched trainers, by name.

    python -m tests.integrations.vllm.contracts FOLDER OUT

FOLDER has the models of `cases.save`.  OUT gets a JSON line for each engine of `ENGINES`: what its
contract differs in from that of a trainer of the same folder.  The first engine is then given
published weights, and others past the publisher.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from perf.rl.engine import EXTENSION
from tests.integrations.vllm import cases, engine, processes


class Engine(NamedTuple):
    """A case, what differs in the engine's config and in the checkpoint's, and names expected."""

    case: str
    overrides: dict[str, object]
    checkpoint: dict[str, object]
    differ: list[str]


ENGINES = (
    *(Engine(name, {}, {}, []) for name in cases.CASES),
    Engine("mistral", {"sliding_window": 48}, {}, ["attention window"]),
    Engine("qwen3_moe", {"num_experts_per_tok": 4}, {}, ["experts per token"]),
    Engine("gemma3", {"query_pre_attn_scalar": 64}, {}, ["attention scale"]),
    Engine("gemma3", {}, {"use_bidirectional_attention": True}, ["attention mask"]),
)
#: Ways to write weights into an engine past the publisher.
WRITES = {
    "load_weights": lambda worker, pairs: worker.get_model().load_weights(iter(pairs)),
    "reload_weights": lambda worker, pairs: worker.reload_weights(weights_iterator=iter(pairs)),
    "in place": lambda worker, pairs: next(worker.get_model().parameters()).data.add_(1),
}


def changed(folder: Path, case: str, checkpoint: dict[str, object]) -> Path:
    """Return the folder of a case, with other entries in its config."""
    if not checkpoint:
        return folder / case
    path = shutil.copytree(folder / case, folder / f"{case}_changed")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | checkpoint))
    return path


def started(path: Path, overrides: dict[str, object]):
    """An engine of a folder."""
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "num_gpu_blocks_override": 24}
    sizes["enable_prefix_caching"] = False  # of hybrids, pages would have to be longer
    return engine.start(path, hf_overrides=overrides, worker_extension_cls=EXTENSION, **sizes)


def trained(path: Path):
    """A patched trainer of a folder."""
    import torch
    import transformers

    import cute_kernels as ck

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ck.patch(model.eval())
    return model


def differing(model, llm, weights=None) -> list[str]:
    """What the contracts of a trainer and of an engine differ in."""
    import cute_kernels as ck

    theirs = ck.Contract.from_dict(llm.collective_rpc("cute_kernels_contract")[0])
    return [d.name for d in ck.contract(model=model, weights=weights).differences(theirs)]


def _apply(write, pairs: list, worker: object) -> None:
    write(worker, pairs)


def writes(llm, model, folder: Path) -> dict[str, list[str]]:
    """What the contracts differ in with published weights, and after each of `WRITES`."""
    from cute_kernels.integrations.publish import publish_weights

    out = {}
    others = [(name, t + 0.25) for name, t in model.state_dict().items()]
    for version, (name, write) in enumerate(WRITES.items(), 1):
        manifest = publish_weights(folder / "published", model, version=version)
        llm.collective_rpc("cute_kernels_load_published", args=(str(folder / "published"), version))
        out[f"published {version}"] = differing(model, llm, manifest)
        llm.collective_rpc(functools.partial(_apply, write, others))
        out[name] = differing(model, llm, manifest)
    return out


def main() -> None:
    """Run the engines, one after the other."""
    folder, out = map(Path, sys.argv[1:])
    from vllm.distributed import cleanup_dist_env_and_memory

    with out.open("w") as file:
        for one in ENGINES:
            path = changed(folder, one.case, one.checkpoint)
            llm, model = started(path, one.overrides), trained(path)
            line = {"differ": differing(model, llm)}
            if one is ENGINES[0]:
                line["writes"] = writes(llm, model, folder)
            print(json.dumps(line), file=file, flush=True)
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


if __name__ == "__main__":
    os.environ |= engine.ENVIRONMENT
    main()
    processes.end()
