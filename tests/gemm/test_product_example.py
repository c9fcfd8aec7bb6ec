"""The product of docs/add_a_kernel.md, as it stands on the page, in the simulator."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys

import pytest
import torch

import ptxsim
from ptxsim.skips import requires_sim
from tests import contract
from tests.kernels.operands import operand
from tests.oracles import gemm as reference
from tests.ranks import ROOT

PAGE = ROOT / "docs" / "add_a_kernel.md"
(KERNEL,) = re.findall(r"```py\n(\"\"\"D\[m, n\].*?)```", PAGE.read_text(), re.S)


def test_a_product_kernel_is_short():
    """With its docstring, its configuration and its fake operands."""
    assert len(KERNEL.splitlines()) < 120
    classes = [node for node in ast.parse(KERNEL).body if isinstance(node, ast.ClassDef)]
    methods = [node.name for node in classes[-1].body if isinstance(node, ast.FunctionDef)]
    assert methods == ["__init__", "__call__", "epilogue"]


@requires_sim
@pytest.mark.sim
def test_it_has_the_bytes_of_its_formula(tmp_path):
    file, name = tmp_path / "kernel_relu_sm90.py", "cute_kernels.gemm.kernel_relu_sm90"
    file.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = module.build(module.ReluConfig("bf16"), compile=ptxsim.compile)
    m, n, k = 300, 264, 72
    a, b = operand(m, k, torch.bfloat16, "k", seed=1), operand(n, k, torch.bfloat16, "k", seed=2)
    bias, out = torch.randn(n).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
    with ptxsim.options(wgmma_math="exact"):
        kernel(a, b, out, bias, 3)
    assert contract.same_bytes(out, reference.chain(a, b, bias).relu().bfloat16())
