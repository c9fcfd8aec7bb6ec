"""The folder on disk: who may own it, what is refused, what a manifest proves."""

import json
import os
import stat

import pytest

from cute_kernels.compile.store import BadEntry, Store
from cute_kernels.errors import CacheError
from tests.compile import toy

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
STRANGER = 12345


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def binary(tmp_path):
    path = tmp_path / "made.so"
    path.write_bytes(bytes(range(256)) * 7)
    return path


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_everything_it_creates_is_private(tmp_path, binary):
    root = tmp_path / "new" / "cache"
    old = os.umask(0)
    try:
        store = Store(root)
        with store.locked("a"):
            store.write("a", binary, "f", {})
    finally:
        os.umask(old)
    assert mode(root) == mode(root.parent) == 0o700
    assert {path.name: mode(path) for path in root.iterdir()} == dict.fromkeys(
        ("a.so", "a.manifest", "a.lock"), 0o600
    )


def test_reads_back_what_it_wrote(root, binary):
    entry = Store(root).write("a", binary, "f", {"note": "x"})
    assert Store(root).read("a") == entry
    assert entry.path.read_bytes() == binary.read_bytes()
    assert Store(root).read("b") is None


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777, 0o720, 0o702])
def test_refuses_a_root_that_others_can_write(root, bits):
    root.mkdir()
    root.chmod(bits)
    with pytest.raises(CacheError, match=f"{root}: its mode {bits:04o}"):
        Store(root)
    assert not list(root.iterdir())


def test_takes_a_root_that_others_can_read(root):
    root.mkdir()
    root.chmod(0o755)
    assert Store(root).read("toy") is None


def test_refuses_a_symbolic_link_as_root(root, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match=f"{root}: it is a symbolic link"):
        Store(root)


def test_refuses_a_file_as_root(root):
    root.write_text("")
    with pytest.raises(CacheError, match=f"{root}: it is not a folder"):
        Store(root)


def test_refuses_a_root_in_a_folder_that_anyone_may_rename_in(tmp_path):
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(CacheError, match="anyone may rename"):
        Store(open_folder / "cache")
    open_folder.chmod(0o1777)  # sticky, like the temporary folder
    Store(open_folder / "cache")


def test_names_a_root_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "cache"
    with pytest.raises(CacheError, match=f"{root}.*CUTE_KERNELS_CACHE=0"):
        Store(root)


@as_root
def test_refuses_a_foreign_root(root):
    root.mkdir(mode=0o700)
    os.chown(root, STRANGER, STRANGER)
    with pytest.raises(CacheError, match=f"{root}: it belongs to user {STRANGER}"):
        Store(root)


def test_a_manifest_that_does_not_carry_its_digest_is_refused(root, binary):
    store = Store(root)
    store.write("a", binary, "f", {})
    line, digest, _ = (root / "a.manifest").read_bytes().split(b"\n")
    other = json.dumps(json.loads(line) | {"symbol": "g"}, sort_keys=True).encode()
    for text in (other + b"\n" + digest + b"\n", line + b"\n", line + b"\n" + digest):
        (root / "a.manifest").write_bytes(text)
        with pytest.raises(BadEntry, match="damaged"):
            store.read("a")


def test_a_manifest_is_bound_to_its_entry(root, binary):
    """Both files of an entry, under the name of another kernel."""
    store = Store(root)
    store.write("a", binary, "f", {})
    for suffix in (".so", ".manifest"):
        (root / f"b{suffix}").write_bytes((root / f"a{suffix}").read_bytes())
        (root / f"b{suffix}").chmod(0o600)
    with pytest.raises(BadEntry, match="is that of a"):
        store.read("b")


def test_a_file_gets_its_name_when_its_bytes_are_on_disk(root, binary, monkeypatch):
    """Per file: made exclusively under a temporary name, synced whole, renamed; folder synced."""
    store = Store(root)
    steps, names, synced = [], {}, {}
    real_open, real_fsync, real_replace = os.open, os.fsync, os.replace

    def spy_open(path, flags, mode=0o777):
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL and flags & os.O_NOFOLLOW and mode == 0o600
        descriptor = real_open(path, flags, mode)
        names[descriptor] = os.path.basename(path)
        return descriptor

    def spy_fsync(descriptor):
        steps.append(f"sync {names[descriptor]}")
        synced[names[descriptor]] = os.fstat(descriptor).st_size
        real_fsync(descriptor)

    def spy_replace(source, target):
        assert source.name.startswith(".a.") and synced[source.name] == source.stat().st_size > 0
        steps.append(f"rename {source.name} {target.name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "open", spy_open)
    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    store.write("a", binary, "f", {})
    first, second = [name for name in synced if name != root.name]
    assert steps == [
        f"sync {first}",
        f"rename {first} a.so",
        f"sync {root.name}",
        f"sync {second}",
        f"rename {second} a.manifest",
        f"sync {root.name}",
    ]


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(root, tmp_path):
    store = Store(root)
    target = tmp_path / "precious"
    target.write_text("data")
    (root / "a.lock").symlink_to(target)
    with pytest.raises(CacheError, match=r"a\.lock"), store.locked("a"):
        pass
    assert target.read_text() == "data"


def test_a_write_over_a_link_replaces_the_link(root, tmp_path, binary):
    store = Store(root)
    target = tmp_path / "precious"
    target.write_text("data")
    (root / "a.so").symlink_to(target)
    store.write("a", binary, "f", {})
    assert target.read_text() == "data"
    assert not (root / "a.so").is_symlink()
    assert store.read("a").path.read_bytes() == binary.read_bytes()


def test_the_next_lock_holder_sweeps_only_its_own_leftovers(root, tmp_path):
    store = Store(root)
    (root / ".a.1234.tmp").write_text("x")
    (root / ".a.folder").mkdir()
    (root / ".a.folder" / "kernel.o").write_text("x")
    (tmp_path / "precious").mkdir()
    (root / ".a.link").symlink_to(tmp_path / "precious")
    (root / ".ab.1234.tmp").write_text("x")
    with store.locked("a"):
        pass
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == [".ab.1234.tmp"]
    assert (tmp_path / "precious").is_dir()


def test_a_lock_excludes_others_and_is_released_on_an_error(root):
    store = Store(root)
    with store.locked("a"):
        assert toy.is_locked(root / "a.lock")
    assert not toy.is_locked(root / "a.lock")
    with pytest.raises(ZeroDivisionError), store.locked("a"):
        raise ZeroDivisionError
    assert not toy.is_locked(root / "a.lock")
