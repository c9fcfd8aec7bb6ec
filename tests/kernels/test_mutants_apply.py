"""Every mutant of an SM90 kernel still finds what it breaks, the nightly ones too.

A kernel's sources change by day; a mutant that names what is gone would fail in the night, or,
where an error counts as a kill, live on in silence.  Nothing is compiled here.
"""

from __future__ import annotations

import inspect

import pytest

from ptxsim import skips
from tests.anchors import AnchorError
from tests.kernels.edited import edit

pytestmark = skips.requires_sim
load = skips.import_module


def functions() -> list:
    """(name, mutant, its arguments behind the patch): those that replace an attribute."""
    gemm = load("tests.gemm.test_sm90_mutants").module_of
    of_logp = load("tests.logp.test_sm90_mutants").KERNELS
    tables = [
        ("gemm.test_sm90_mutants", lambda item: (gemm(item[1]),)),
        ("logp.test_sm90_mutants", lambda item: (of_logp[item[1]][0],)),
    ]
    out = []
    for name, arguments in tables:
        table = load(f"tests.{name}")
        for item in table.MUTANTS:
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

    attention = "fwd_sm90_mutants", "bwd_sm90_mutants", "certificate", "long_sm90", "packs_sm90"
    out = {
        f"moe, {entry}: {name}": (f"moe.kernel_{entry}_sm90", *pieces)
        for entry, edits in load("tests.moe.test_sm90_mutants").EDITS.items()
        for name, pieces in edits.items()
    }
    for name in attention:
        out |= of(f"sparse_attn.test_{name}", lambda item: item[1:])
    tables, post, pages = (
        f"sparse_attn.{name}"
        for name in ("kernel_varlen_tables_sm90", "kernel_bwd_post_sm90", "device.paged_tiles")
    )
    return {
        **{key: pieces for key, pieces in out.items() if not callable(pieces[0])},
        **of("moe.test_sm90_mutants", lambda i: ("moe.device.work_table", *i), "UNIT_EDITS"),
        **of("moe.test_sm90_mutants", lambda i: i, "NARROW_OFFSETS"),
        **of("sparse_attn.test_sinks", lambda i: i, "SM90_MUTANTS"),
        **of("sparse_attn.test_fwd_sm90_spans", lambda i: i),
        **of("sparse_attn.test_bwd_post_sm90", lambda i: (post, *i)),
        **of("sparse_attn.test_paged_sm90", lambda i: (pages, *i)),
        **of("sparse_attn.test_pack_tables", lambda i: (tables, *i)),
        **of("gemm.test_sm90_mutants", lambda i: ("dsl.product", *i), "FRAME_EDITS"),
        **of("logp.test_sm90_mutants", lambda i: ("logp.kernel_few_sm90", *i), "MEETINGS"),
        **of("mhc.test_sm90_mutants", lambda i: (f"mhc.{i[0]}", *i[1:-1])),
        **of("norm.test_sm90", lambda i: (f"norm.{i[0]}", *i[1:-1])),
    }


def test_mutants_of_attributes_find_them(monkeypatch):
    mutants = functions()
    assert len(mutants) > 20
    for name, mutant, arguments in mutants:
        with monkeypatch.context() as patch:
            try:
                mutant(patch, *arguments)
            except Exception as error:
                pytest.fail(f"{name}, {mutant.__name__}: {error!r}")


def test_mutants_of_texts_find_them():
    mutants = texts()
    assert len(mutants) > 300
    for name, pieces in mutants.items():
        try:
            edit(*pieces)
        except (AnchorError, TypeError) as error:
            pytest.fail(f"{name}: {error}")


def test_a_stale_text_is_noticed():
    with pytest.raises(AnchorError):
        edit("norm.kernel_fwd_sm90", "a text that no kernel has", "")


def triton_tables():
    """(runner, table of mutants) of every Triton test."""
    for system in ("gemm", "logp", "mhc", "norm", "rowwise"):
        module = load(f"tests.{system}.test_triton")
        yield module.RUNNER, module.MUTANTS
    moe, attention = (
        load("tests.moe.test_triton"),
        load("tests.sparse_attn.test_triton_interpreted"),
    )
    yield moe.PRODUCTS, moe.MUTANTS | moe.MUTANTS_ALONE
    yield moe.ROUTES, moe.ROUTING_MUTANTS
    yield attention.DENSE, attention.rows(attention.DENSE_MUTANTS)
    yield attention.PAGED, attention.rows(attention.PAGED_MUTANTS)


def test_texts_of_triton_mutants_are_found():
    mutants = load("tests.triton_runner").mutants
    for runner, table in triton_tables():
        for parameter in mutants(table):
            runner.texts(*parameter.values[-1])
