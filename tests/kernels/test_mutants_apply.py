"""Every mutant of an SM90 kernel still finds what it breaks, the nightly ones too.

A kernel's sources change by day; a mutant that names what is gone would fail in the night, or,
where an error counts as a kill, live on in silence.  Nothing is compiled here.
"""

from __future__ import annotations

import inspect
from functools import cache

import pytest

from ptxsim import skips
from tests.anchors import AnchorError, replaced
from tests.kernels.edited import PACKAGE

pytestmark = skips.requires_sim
load = skips.import_module


def functions() -> list:
    """(name, mutant, its arguments behind the patch): those that replace an attribute."""
    dense = load("cute_kernels.gemm.kernel_sm90")
    forward = load("cute_kernels.sparse_attn.kernel_fwd_sm90")
    of_logp = load("tests.logp.test_sm90_mutants").KERNELS
    tables = [
        ("gemm.test_sm90_mutants", lambda item: (dense,)),
        ("logp.test_sm90_mutants", lambda item: (of_logp[item[1]][0],)),
        ("sparse_attn.test_fwd_sm90_mutants", lambda item: (forward,)),
        ("sparse_attn.test_fwd_sm90_merge", lambda item: (forward,)),
        ("sparse_attn.test_bwd_sm90_mutants", lambda item: ()),
        ("sparse_attn.test_bwd_sm90_certificate", lambda item: ()),
        ("sparse_attn.test_packs_in_place_sm90", lambda item: ()),
        ("sparse_attn.test_packs_lists_sm90", lambda item: ()),
    ]
    out = []
    for name, arguments in tables:
        table = load(f"tests.{name}")
        for item in (*table.MUTANTS, *getattr(table, "MUTANTS_OF_BITS", ())):
            item = getattr(item, "values", item)
            item = item if isinstance(item, tuple) else (item,)
            (mutant,) = (part for part in item if inspect.isroutine(part))
            out.append((name, mutant, arguments(item)))
    return out


def texts() -> dict[str, tuple]:
    """Name -> (source, (old, new), ..): those that replace a piece of a source."""

    def of(name: str, where, table: str = "MUTANTS") -> dict[str, tuple]:
        items = getattr(load(f"tests.{name}"), table)
        return {f"{name}: {key}": where(item) for key, item in items.items()}

    wide = load("tests.sparse_attn.test_bwd_wide_sm90_mutants").KERNEL
    tables = "sparse_attn.kernel_varlen_tables_sm90"
    return {
        **of("sparse_attn.test_fwd_no_overlap_sm90", lambda item: item),
        **of("sparse_attn.test_sinks", lambda i: i, "SM90_MUTANTS"),
        **of("sparse_attn.test_fwd_sm90_stays", lambda i: (f"sparse_attn.{i[1]}", *i[2:])),
        **of("sparse_attn.test_fwd_sm90_spans", lambda i: (f"sparse_attn.{i[0]}", *i[1:])),
        **of("sparse_attn.test_bwd_wide_sm90_mutants", lambda i: (wide, *i[1:])),
        **of("sparse_attn.test_pack_tables", lambda i: (tables, *i)),
        **of("gemm.test_sm90_mutants", lambda i: ("dsl.product", *i), "FRAME_EDITS"),
        **of("moe.test_sm90_mutants", lambda i: ("moe.kernel_grouped_sm90", *i), "EDITS"),
        **of("moe.test_sm90_dw", lambda i: ("moe.kernel_grouped_dw_sm90", *i), "EDITS"),
        **of("moe.test_sm90_tree", lambda i: ("moe.kernel_grouped_tree_sm90", *i), "EDITS"),
        **of("moe.test_sm90_few_mutants", lambda i: ("moe.kernel_grouped_few_sm90", *i), "EDITS"),
        **of("logp.test_sm90_mutants", lambda i: ("logp.kernel_few_sm90", *i), "MEETINGS"),
        **of("mhc.test_sm90_mutants", lambda i: (f"mhc.{i[0]}", *i[1:-1])),
        **of("norm.test_sm90", lambda i: (f"norm.{i[0]}", *i[1:-1])),
    }


@cache
def source(name: str) -> str:
    return PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text()


def edit(where: str, *pieces) -> str:
    text = source(where)
    for old, new in zip(pieces[::2], pieces[1::2], strict=True):
        text = replaced({where: text}, old, new)[where]
    return text


def test_mutants_of_attributes_find_them(monkeypatch):
    mutants = functions()
    assert len(mutants) > 100
    for name, mutant, arguments in mutants:
        with monkeypatch.context() as patch:
            try:
                mutant(patch, *arguments)
            except Exception as error:
                pytest.fail(f"{name}, {mutant.__name__}: {error!r}")


def test_mutants_of_texts_find_them():
    mutants = texts()
    assert len(mutants) > 150
    for name, pieces in mutants.items():
        try:
            edit(*pieces)
        except (AnchorError, TypeError) as error:
            pytest.fail(f"{name}: {error}")


def test_a_stale_text_is_noticed():
    with pytest.raises(AnchorError):
        edit("norm.kernel_fwd_sm90", "a text that no kernel has", "")


def test_texts_of_triton_mutants_are_found():
    mutants = load("tests.triton_runner").mutants
    gemm, moe = load("tests.gemm.test_triton"), load("tests.moe.test_triton")
    for runner, table in (
        (gemm.RUNNER, gemm.MUTANTS),
        (moe.PRODUCTS, moe.MUTANTS | moe.MUTANTS_ALONE),
        (moe.ROUTES, moe.ROUTING_MUTANTS),
    ):
        for parameter in mutants(table):
            runner.texts(*parameter.values[-1])
