"""The environment: values and names that are not taken, folders that are not there."""

from __future__ import annotations

import os
import pwd
import warnings

import pytest

from cute_kernels import settings
from cute_kernels.errors import SettingError, SettingWarning
from cute_kernels.integrations import sglang
from cute_kernels.runtime import reduction


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No setting of the machine, and nothing said yet about its names."""
    for name in [name for name in os.environ if name.startswith("CUTE_KERNEL")]:
        monkeypatch.delenv(name)
    settings._warn_of_unknown_names.cache_clear()
    yield monkeypatch
    settings._warn_of_unknown_names.cache_clear()


#: Text that is no whole number, some of which str.isdigit or int() take.
NUMBERS = ["abc", "-1", "1.5", " 1", "1_0", "²", "1" * 10]
BAD = {
    "CACHE": ["2", "yes"],
    "CACHE_DIR": ["~nosuch/x", "~nosuch"],
    "AOT_DIR": ["~nosuch/x"],
    "BACKEND": ["cublas", "CPU"],
    "EXTENSION": ["2", "off"],
    "LOG": ["true", "2"],
    "SKINNY": ["ordered", "Fast"],
    "LOGITS_MEMORY_MIB": NUMBERS,
    "MAX_CTAS": NUMBERS,
    "SGLANG": ["2", "on"],
    "VLLM": ["2", "yes"],
}
USES = {
    "CACHE": settings.cache_enabled,
    "CACHE_DIR": settings.cache_dir,
    "AOT_DIR": settings.aot_dir,
    "BACKEND": settings.forced_backend,
    "EXTENSION": settings.extension,
    "LOG": settings.log,
    "SKINNY": reduction.now,
    "LOGITS_MEMORY_MIB": settings.logits_memory,
    "MAX_CTAS": settings.max_ctas,
    "SGLANG": sglang.register,
    "VLLM": settings.vllm,
}
CASES = [(name, value) for name, values in BAD.items() for value in values]


def test_every_setting_has_bad_values_here():
    assert set(BAD) == set(USES) == {setting.name for setting in settings.TABLE}


@pytest.mark.parametrize(("name", "value"), CASES, ids=lambda v: v[:12])
def test_a_value_that_is_not_taken_is_refused_by_name_at_use_and_by_check(environment, name, value):
    environment.setenv(f"CUTE_KERNELS_{name}", value)
    with pytest.raises(SettingError, match=rf"^CUTE_KERNELS_{name}: expected .*, got '") as used:
        USES[name]()
    with pytest.raises(SettingError) as checked:
        settings.check()
    assert str(checked.value) == str(used.value)


def test_values_and_homes_are_taken(environment, tmp_path):
    environment.setenv("HOME", str(tmp_path))
    environment.setenv("CUTE_KERNELS_CACHE_DIR", "~/kernels")
    environment.setenv("CUTE_DSL_LOG_LEVEL", "1")  # not ours
    environment.setenv("CUTLASS_KERNELS", "1")
    assert settings.cache_dir() == tmp_path / "kernels" and settings.aot_dir() is None
    for value in (0, 7, 999_999_999):
        environment.setenv("CUTE_KERNELS_MAX_CTAS", str(value))
        settings.check()
        assert settings.max_ctas() == value
    for name in ("HOME", "XDG_CACHE_HOME", "CUTE_KERNELS_CACHE_DIR"):
        environment.delenv(name, raising=False)
    environment.setattr(pwd, "getpwuid", lambda *_: {}["getpwuid(): uid not found"])
    with pytest.raises(SettingError, match=r"CUTE_KERNELS_CACHE_DIR: expected a folder.*home"):
        settings.cache_dir()


TYPOS = {
    "CUTE_KERNELS_MAX_CTA": "CUTE_KERNELS_MAX_CTAS",
    "CUTE_KERNEL_AOT_DIR": "CUTE_KERNELS_AOT_DIR",
    "CUTE_KERNELS_CACHEDIR": "CUTE_KERNELS_CACHE_DIR",
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_name_that_is_no_setting_is_refused_by_check_and_warned_of_once(environment, typo):
    environment.setenv(typo, "1")
    start = f"environment variable: expected one of '{TYPOS[typo]}'"
    with pytest.raises(SettingError, match=start) as refused:
        settings.check()
    assert str(refused.value).endswith(f"got '{typo}'")
    with pytest.warns(SettingWarning, match=start) as told:
        assert settings.max_ctas() == 0
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.cache_enabled()
