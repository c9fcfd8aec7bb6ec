"""DeepSeek-V4's numbers in docs/mhc.md, against transformers' config and module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_kernels import mhc

pytest.importorskip("transformers.models.deepseek_v4", reason="a transformers without DeepSeek-V4")
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

DOC = Path(__file__).resolve().parents[2] / "docs" / "mhc.md"
C = 32


def row() -> list[str]:
    """Cells of a row: eps, pre_eps, factor of H_post, iterations, form, layout of the streams."""
    (line,) = [x for x in DOC.read_text().splitlines() if x.startswith("| DeepSeek-V4")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_page_has_the_configs_numbers():
    eps, pre_eps, _, iterations, form, layout = row()
    config = DeepseekV4Config()
    assert float(eps.split(",")[0]) == config.rms_norm_eps
    assert float(pre_eps) == config.hc_eps == float(form.split(", ")[1])
    assert int(iterations) == config.hc_sinkhorn_iters
    assert form.split(", ")[0] == "epsilon" and layout == "nc"


def test_a_site_with_the_pages_options_is_transformers_module():
    eps, pre_eps, factor, iterations, form, layout = row()
    config = DeepseekV4Config(hidden_size=C)
    module, n = theirs.DeepseekV4HyperConnection(config), config.hc_mult
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    x = torch.randn(3, 5, n, C, generator=generator)
    post, comb, collapsed = module(x)
    want = post.unsqueeze(-1) * torch.tanh(collapsed).unsqueeze(-2) + comb.transpose(-1, -2) @ x

    state, options = mhc.from_tilekernels(
        module.fn,
        module.scale,
        module.base,
        norm_eps=float(eps.split(",")[0]),
        pre_eps=float(pre_eps),
        post_mult_value=float(factor),
        sinkhorn_repeat=int(iterations),
        sinkhorn_eps=float(form.split(", ")[1]),
        layout=layout,
    )
    site = mhc.HyperConnection(torch.tanh, C, n=n, options=options)
    site.load_state_dict(state)
    assert options.form == form.split(", ")[0]
    torch.testing.assert_close(site(x), want, rtol=1e-4, atol=1e-4)
    # TileKernels' defaults, of which two are others, are far from it.
    state, options = mhc.from_tilekernels(module.fn, module.scale, module.base)
    other = mhc.HyperConnection(torch.tanh, C, n=n, options=options)
    other.load_state_dict(state)
    assert (other(x) - want).abs().max() > 0.1
