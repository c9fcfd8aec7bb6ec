"""Names of objects that compiled graphs hold on to.

``torch.compile`` guards a string attribute on every release that this package supports; a frozen
dataclass as a constant only on the newest.  So a mask and a schedule have a handle, their own for
the life of the process, and tracing passes it in their place.
"""

from __future__ import annotations

import itertools
import weakref

_objects: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(value: object) -> str:
    """A handle of ``value``, never given to another object of this process."""
    handle = f"{type(value).__name__} {next(_numbers)}"
    _objects[handle] = value
    return handle


def resolve(handle: str) -> object:
    """The object of a handle, which whoever passes the handle keeps alive."""
    return _objects[handle]
