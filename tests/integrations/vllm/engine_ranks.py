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


def main() -> None:
    """Draw from all prompts of a case in one batch."""
    folder, out, name, ranks = sys.argv[1:]
    from vllm import LLM, SamplingParams, TokensPrompt

    from perf.core.bits import fp32_bits
    from tests.integrations.vllm import cases

    llm = LLM(
        model=str(Path(folder) / name),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        block_size=cases.PAGE,
        tensor_parallel_size=int(ranks),
        enforce_eager=True,
        additional_config={"cute_kernels": {"order": "tree"}},
        worker_extension_cls="cute_kernels.integrations.contract_exchange.WorkerExtension",
        seed=0,
    )
    prompts = cases.prompts(name)
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        SamplingParams(
            temperature=0.0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False
        ),
        use_tqdm=False,
    )
    with open(out, "w") as file:
        for i, output in enumerate(outputs):
            tokens = list(output.outputs[0].token_ids)
            steps = zip(tokens, output.outputs[0].logprobs, strict=True)
            line = {"case": name, "run": "batched", "prompt": i, "tokens": tokens}
            line["bits"] = fp32_bits([step[token].logprob for token, step in steps])
            print(json.dumps(line), file=file)
    contracts = llm.collective_rpc("cute_kernels_contract")
    Path(out).with_suffix(".contracts").write_text(json.dumps(contracts))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the end of vLLM's processes is not what is tested
