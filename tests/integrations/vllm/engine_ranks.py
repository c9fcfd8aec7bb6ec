"""An engine of two tensor-parallel ranks, in processes of vLLM's own.

    python -m tests.integrations.vllm.engine_ranks FOLDER OUT CASE RANKS

The plug-in is asked for by ``additional_config``, with the order that ranks share.  OUT gets a JSON
line for each prompt, as of `engine`; OUT with the suffix .contracts the contracts of the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from perf.rl.engine import EXTENSION
from tests.integrations.vllm import engine


def main() -> None:
    """Draw from all prompts of a case in one batch."""
    folder, out, name, ranks = sys.argv[1:]
    from vllm import SamplingParams, TokensPrompt

    from tests.integrations.vllm import cases

    llm = engine.start(
        Path(folder) / name,
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        tensor_parallel_size=int(ranks),
        additional_config={"cute_kernels": {"order": "tree"}},
        worker_extension_cls=EXTENSION,
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in cases.prompts(name)]
    parameters = SamplingParams(
        temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    with open(out, "w") as file:
        for i, output in enumerate(outputs):
            print(json.dumps(engine.line_of(name, "batched", i, output)), file=file)
    contracts = llm.collective_rpc("cute_kernels_contract")
    Path(out).with_suffix(".contracts").write_text(json.dumps(contracts))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's processes is not what is tested
