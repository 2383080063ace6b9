"""Which versions of transformers the integration was made for."""

from __future__ import annotations

from specker.packages import require

OLDEST = (4, 57)
"""The first version served: `custom_generate` takes a function since then."""
NEWEST = (5, 24)
"""The last version whose generation code was read; tested: 4.57.6, 5.9.0, 5.17.0, 5.20.2 and 5.24.0."""


def installed_version() -> tuple[int, int]:
    """Return (major, minor) of the transformers installed.

    Raises:
        ModelUnavailableError: transformers is not installed.
        ValueError: the version is outside `OLDEST` .. `NEWEST`.

    Example:
        >>> OLDEST <= installed_version() <= NEWEST
        True
    """
    text = str(require("transformers").__version__)
    major, minor = text.split(".")[:2]
    version = int(major), int(minor)
    if not OLDEST <= version <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        raise ValueError(
            f"transformers: expected version {oldest} to {newest}, got {text}: its generation code may call or mean "
            "something else; install a version in between, or use specker.generation.generate"
        )
    return version
