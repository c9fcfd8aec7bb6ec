"""The fixture of ranks that are threads."""

from tests.ranks.threads import threaded  # noqa: F401
