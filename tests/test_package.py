"""The package as a user meets it: lazy names, backends and their reasons, the command line."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels import about, arch, settings
from cute_kernels.compile import extension
from cute_kernels.integrations import transformers as transformers_integration
from cute_kernels.runtime import dispatch, python_version
from cute_kernels.systems import SYSTEMS

ROOT = Path(__file__).resolve().parent.parent


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


#: A forward and a backward of every system, what tells of them, and the launchers' modules.
ON_A_CPU = """
import sys, torch
before = set(sys.modules)
import cute_kernels as ck
from cute_kernels import mhc
from cute_kernels.sparse_attn.api import block_sparse_attention

def leaf(*shape):
    return torch.randn(shape).requires_grad_()

q, x = leaf(1, 3, 2, 64), leaf(2, 3)
block_sparse_attention(*[q.bfloat16()] * 3).sum().backward()
ck.linear(x, leaf(4, 3)).sum().backward()
ck.rms_norm(x, leaf(3)).sum().backward()
ck.softmax(x).sum().backward()
ck.linear_logp(x, leaf(5, 3), torch.tensor([0, 2])).sum().backward()
ck.linear_policy_loss(x, leaf(5, 3), torch.tensor([0, 2]), loss="cross_entropy").loss.backward()
ck.log_probs(torch.ones(2, 3), torch.tensor([0, 2]))
weights = torch.randn(24, 20), torch.randn(3), torch.randn(24)
mhc.mix_and_aggregate(leaf(3, 5, 4), *weights)[0].sum().backward()
ck.info()
from cute_kernels.sparse_attn import launch
assert not torch.cuda.is_initialized() and "cute_kernels.nn" not in sys.modules
ck.nn.Linear
names = "cutlass", "triton", "tvm_ffi", "rich", "typer", "transformers", "torch._dynamo"
print([m for m in names if m in sys.modules and m not in before])
"""


def test_importing_and_using_the_cpu_needs_torch_only():
    assert python(ON_A_CPU) == "[]"


def test_import_alone_loads_no_system_and_an_old_python_loads_less():
    """A faked version in a fresh process: nothing of the package but the check is imported."""
    code = (
        "import sys; {}\n"
        "try:\n    import cute_kernels\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "print(sorted(m for m in sys.modules if m[:6] == 'cute_k'))"
    )
    # A checkout loads `schedulers` too: its folder is not inside the package.
    names = ("lazy", "runtime", "runtime.python_version", "schedulers", "systems")
    want = str(["cute_kernels", *(f"cute_kernels.{name}" for name in names)])
    assert python(code.format("")) == want
    want = "cute_kernels needs Python >= 3.10, found 3.9\n['cute_kernels.runtime']"
    assert python(code.format("sys.version_info = (3, 9, 18)")) == want
    for version in ((3, 7, 16), (2, 7, 18)):
        message = f"^cute_kernels needs Python >= 3.10, found {version[0]}.{version[1]}$"
        for error, argv in ((ImportError, ["script.py"]), (SystemExit, ["-m", "info"])):
            with pytest.raises(error, match=message):
                python_version.check(version, argv)
    python_version.check((3, 10, 0), ["-m"])
    need = ".".join(map(str, python_version.OLDEST))
    assert f'requires-python = ">={need}' in (ROOT / "pyproject.toml").read_text()
    for name in ("__init__", "__main__", "runtime/__init__", "runtime/python_version"):
        path = ROOT / "cute_kernels" / f"{name}.py"
        ast.parse(path.read_text(), str(path), feature_version=(3, 7))


@pytest.mark.parametrize("folder", ["schedulers", "cute_kernels/schedulers", None])
def test_schedulers_are_found_in_a_checkout_and_in_an_installation(tmp_path, folder):
    """With nothing on the path but the copy and the standard library."""
    package, copy = Path(ck.__file__).parent, tmp_path / "cute_kernels"
    (copy / "runtime").mkdir(parents=True)
    names = ("__init__.py", "lazy.py", "systems.py", "log.py", "errors.py")
    for name in (*names, "runtime/__init__.py", "runtime/python_version.py"):
        shutil.copyfile(package / name, copy / name)
    if folder:
        shutil.copytree(Path(ck.schedulers.__file__).parent, tmp_path / folder)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "import cute_kernels.schedulers as s; from cute_kernels.schedulers import handles;"
        "import cute_kernels as ck; print(ck.schedulers is s, s.__file__)"
    )
    command = [sys.executable, "-I", "-S", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True)
    if folder:
        assert run.stdout.split() == ["True", str(tmp_path / folder / "__init__.py")], run.stderr
    else:
        last = run.stderr.splitlines()[-1]
        assert str(tmp_path / "schedulers") in last and "cute_kernels/schedulers" in last


def test_every_public_name_resolves():
    for name in ck.__all__:
        assert getattr(ck, name) is not None
    assert set(ck.__all__) <= set(dir(ck))
    with pytest.raises(AttributeError, match="no attribute 'fft'"):
        _ = ck.fft


def gpu(kind: str, name: str) -> arch.Device:
    return arch.Device("cuda:0", kind, name, 132)


@pytest.mark.parametrize(
    ("device", "want"),
    [
        (gpu("cuda", "sm_90a"), {"bf16": "cute_sm90", "fp32": "triton"}),
        (gpu("cuda", "sm_80"), {"bf16": "triton", "fp32": "triton"}),
        (gpu("cuda", "sm_100"), {"bf16": "triton", "fp32": "triton"}),
        (gpu("hip", "gfx942"), {"bf16": "triton", "fp32": "triton"}),
    ],
    ids=lambda v: getattr(v, "arch", ""),
)
def test_backend_of_each_device(monkeypatch, device, want):
    monkeypatch.setattr(arch, "describe", lambda d: device)
    monkeypatch.setattr(arch, "_installed", lambda name: True)
    import cute_kernels.gemm.op  # noqa: F401

    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        reasons = dispatch.reasons("gemm", "cuda:0", dtype)
        assert next(b for b, why in reasons.items() if why is None) == want[name]
        assert all(why is None or len(why) > 10 for why in reasons.values())


def test_a_missing_package_is_a_reason_not_a_fallback(monkeypatch):
    monkeypatch.setattr(arch, "describe", lambda d: gpu("cuda", "sm_90a"))
    monkeypatch.setattr(arch, "_installed", lambda name: False)
    import cute_kernels.gemm.op  # noqa: F401

    reasons = dispatch.reasons("gemm", "cuda:0", torch.bfloat16)
    assert "not installed" in reasons["cute_sm90"] and "not installed" in reasons["triton"]
    # Triton alone does not stand in for the SM90 kernels: its bits are others.
    monkeypatch.setattr(arch, "_installed", lambda name: name == "triton")
    assert (
        "CUTE_KERNELS_BACKEND=triton"
        in dispatch.reasons("gemm", "cuda:0", torch.bfloat16)["triton"]
    )
    assert dispatch.reasons("gemm", "cuda:0", torch.float32)["triton"] is None
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    assert dispatch.reasons("gemm", "cuda:0", torch.bfloat16)["triton"] is None
    monkeypatch.delenv("CUTE_KERNELS_BACKEND")
    dispatch.forget()
    with pytest.raises(ck.errors.BackendUnavailable, match="extra cu13"):
        dispatch.backend("gemm", "cuda:0", torch.bfloat16)


def test_info_is_json_and_complete():
    out = ck.info()
    assert json.loads(json.dumps(out)) == out
    assert set(out["ops"]) == {op for system in SYSTEMS for op in system.ops}
    on_cpu = out["ops"]["linear"]["cpu"]
    assert on_cpu["backends"]["cpu"] is None and "SM90" in on_cpu["backends"]["cute_sm90"]
    assert on_cpu["contract_id"] == ck.contract_id("linear", "cpu")
    assert {s.name for s in settings.TABLE} == set(out["settings"])


def test_info_says_why_calls_are_looked_up_in_python(monkeypatch):
    why = [None, "no C compiler"]
    monkeypatch.setattr(extension, "missing", lambda: why[-1])
    assert torch.cuda.is_available() or ck.info()["extension"] == "there is no CUDA device"
    monkeypatch.setattr(about, "_devices", lambda: ["cpu", "cpu:0"])
    assert ck.info()["extension"] == why.pop()
    assert ck.info()["extension"] is None


def test_a_forced_backend_reaches_the_choice(monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "cpu")
    assert dispatch.backend("gemm", "cpu", torch.bfloat16) == "cpu"
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "triton")
    with pytest.raises(ck.errors.BackendUnavailable, match="forces another backend"):
        ck.matmul(torch.randn(2, 3), torch.randn(3, 2))


def test_a_gpu_that_is_not_there_has_no_backend():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in ("cuda", "cuda:0", "cuda:63"):
        with pytest.raises(ck.errors.BackendUnavailable, match="is none here"):
            ck.contract_id("linear", name)
        with pytest.raises(ck.errors.BackendUnavailable):
            ck.guarantees("matmul", name)


def test_every_extra_has_the_bound_of_transformers_that_a_patch_refuses_by():
    text = (ROOT / "pyproject.toml").read_text()
    bounds = re.findall(r'"transformers([^"]*)"', text)
    want = f">={'.'.join(map(str, transformers_integration.OLDEST))}"
    assert len(bounds) >= 2 and set(bounds) == {want}
    page = (ROOT / "docs" / "support.md").read_text().partition("## Versions")[2]
    assert f"| {want.removeprefix('>=')} or newer" in page.partition("[transformers]")[2]
    assert ck.info()["versions"]["transformers"] == arch.version("transformers")
