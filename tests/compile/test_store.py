"""The folder on disk: who may own it, what is refused, what a manifest proves."""

import json
import os
import stat

import pytest

from cute_kernels.compile.store import BadEntry, Store
from cute_kernels.errors import CacheError
from tests.compile import toy


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


def folder(mode):
    def make(root):
        root.mkdir()
        root.chmod(mode)

    return make


def link(root):
    (root.parent / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(root.parent / "elsewhere")


def foreign(root):
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)


def in_a_file(root):
    root.parent.rmdir()
    root.parent.write_text("")


REFUSED = {
    "group can write": (folder(0o720), "{root}: its mode 0720"),
    "others can write": (folder(0o702), "{root}: its mode 0702"),
    "a link": (link, "{root}: it is a symbolic link"),
    "a file": (lambda root: root.write_text(""), "{root}: it is not a folder"),
    "in an open folder": (lambda root: root.parent.chmod(0o777), "anyone may rename"),
    "in a file": (in_a_file, "{root}.*CUTE_KERNELS_CACHE=0"),
    "foreign": (foreign, "{root}: it belongs to user 12345"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_roots(tmp_path, what):
    if what == "foreign" and os.geteuid():
        pytest.skip("only root can give a file away")
    root = tmp_path / "top" / "cache"
    root.parent.mkdir()
    make, words = REFUSED[what]
    make(root)
    with pytest.raises(CacheError, match=words.format(root=root)):
        Store(root)
    assert not root.is_dir() or not list(root.iterdir())


def test_roots_that_others_read_and_that_lie_in_a_sticky_folder_are_taken(root):
    folder(0o755)(root)
    assert Store(root).read("toy") is None
    root.parent.chmod(0o1777)  # like the temporary folder
    Store(root.parent / "other")


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


def test_links_are_not_followed_and_an_entry_is_read_back(root, tmp_path, binary):
    store, target = Store(root), tmp_path / "precious"
    target.write_text("data")
    for name in ("a.lock", "a.so"):
        (root / name).symlink_to(target)
    with pytest.raises(CacheError, match=r"a\.lock"), store.locked("a"):
        pass
    entry = store.write("a", binary, "f", {"note": "x"})
    assert target.read_text() == "data"
    assert not (root / "a.so").is_symlink()
    assert Store(root).read("a") == entry and Store(root).read("b") is None
    assert entry.path.read_bytes() == binary.read_bytes()


def test_the_next_lock_holder_sweeps_only_its_own_leftovers(root, tmp_path):
    store = Store(root)
    (root / ".a.1234.tmp").write_text("x")
    (root / ".a.folder").mkdir()
    (root / ".a.folder" / "kernel.o").write_text("x")
    (tmp_path / "precious").mkdir()
    (root / ".a.link").symlink_to(tmp_path / "precious")
    (root / ".ab.1234.tmp").write_text("x")
    with pytest.raises(ZeroDivisionError), store.locked("a"):
        assert toy.is_locked(root / "a.lock")
        raise ZeroDivisionError
    assert not toy.is_locked(root / "a.lock")
    assert [path.name for path in root.iterdir() if path.name.startswith(".")] == [".ab.1234.tmp"]
    assert (tmp_path / "precious").is_dir()
