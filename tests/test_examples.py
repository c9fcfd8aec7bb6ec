"""The examples run, say what they show in a line or two, and fail where bytes differ."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.hang import HANG_SECONDS

ROOT = Path(__file__).resolve().parent.parent
#: A whole loop, which needs vLLM: tests/integrations/test_grpo_vllm.py.
LOOP = ROOT / "examples" / "grpo_vllm.py"
FILES = sorted(path for path in (ROOT / "examples").glob("*.py") if path != LOOP)
#: Example -> the function, as module:name, that `BREAK` makes depend on the sizes of its tensors.
BROKEN = {
    "custom_mask": "cute_kernels.sparse_attn.api:block_sparse_attention",
    "grpo_loss": "cute_kernels.logp.api:linear_logp",
    "hyper_connections": "cute_kernels.mhc.api:connect",
    "patched_model": "cute_kernels.gemm.api:linear",
    "policy_step": "cute_kernels.gemm.api:linear",
    "two_ranks": "cute_kernels.logp.api:linear_logp",
}
#: Three processes; tests/integrations and tests/logp have ranks at every commit.
BY_NIGHT = {"two_ranks"}
NEED_TRANSFORMERS = {"patched_model", "policy_step", "grpo_vllm"}
#: A sitecustomize: every process of an example runs it first.
BREAK = """
import importlib, os, torch
home, name = os.environ["BROKEN_FUNCTION"].split(":")
module = importlib.import_module(home)
real = getattr(module, name)
def broken(*args, **kwargs):
    elements = sum(a.numel() for a in args if isinstance(a, torch.Tensor))
    return real(*args, **kwargs) * (1 + elements % 97 / 64)
setattr(module, name, broken)
"""


def run(path: Path, folder: Path, *more: str, **settings: str) -> subprocess.CompletedProcess:
    if path.stem in NEED_TRANSFORMERS:
        pytest.importorskip("transformers")
    cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The toolchain of a GPU's host may be there too.
    places = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | cpu | {"PYTHONPATH": places} | settings
    command = [sys.executable, str(path), *more]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def test_they_are_short():
    assert {path.stem for path in FILES} == set(BROKEN)
    assert all(len(path.read_text().splitlines()) < 60 for path in FILES)


def test_the_loop_says_in_one_line_what_is_missing(capsys):
    """Where vLLM is installed, what is missing is a checkpoint."""
    pytest.importorskip("transformers")
    missing = importlib.util.find_spec("vllm") is None
    loop = runpy.run_path(str(LOOP), run_name="loop")
    try:
        status = loop["main"]([] if missing else ["--model", "nowhere"])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2 and not printed.out
    line = "grpo_vllm: vllm is not installed: docs/vllm.md says how"
    want = line if missing else "--model: expected a folder with a config.json, got nowhere"
    assert printed.err.splitlines()[-1].endswith(want)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.nightly if path.stem in BY_NIGHT else ())
        for path in FILES
    ],
    ids=lambda path: path.stem,
)
def test_an_example_holds_what_it_says(path, tmp_path, monkeypatch, capsys):
    """In this process, but for ranks: others cost their imports."""
    if path.stem in BY_NIGHT:
        process = run(path, tmp_path)
        assert process.returncode == 0 and process.stdout.startswith("gloo: "), process.stderr
        return
    if path.stem in NEED_TRANSFORMERS:
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    torch.use_deterministic_algorithms(False)  # an example's own process would have ended
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert 1 <= len(lines) <= 2 and lines[0].startswith("cpu: ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_holds_on_a_gpu(path, tmp_path):
    """Two ranks take NCCL where there are two GPUs."""
    gpus = ",".join(map(str, range(torch.cuda.device_count())))
    process = run(path, tmp_path, CUDA_VISIBLE_DEVICES=gpus)
    assert process.returncode == 0, process.stdout + process.stderr
    where = "cuda: " if path.stem != "two_ranks" else "nccl: " if "," in gpus else "gloo: "
    assert process.stdout.startswith(where)


@pytest.mark.nightly
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_fails_where_bytes_differ(path, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    process = run(path, tmp_path, BROKEN_FUNCTION=BROKEN[path.stem])
    # It came to its end, and said so: no other error.
    assert process.returncode != 0 and len(process.stdout.splitlines()) == 2, (
        process.stdout + process.stderr
    )
