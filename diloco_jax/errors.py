"""The error for a wrong config or command line, and "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that cannot run: names the field, its value and the remedy."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?`, or the empty string if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
