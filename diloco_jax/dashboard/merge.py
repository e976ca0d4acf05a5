"""One merge as the page shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(kw_only=True)
class ShownMerge:
    """One merge: who took part, with how many tokens, and its measures."""

    time: float
    fragment: int
    version: int
    final: bool
    share: float
    tokens: dict[str, int]
    stale: dict[str, int]
    """Versions by which a delta's base was behind; only those that were."""
    measures: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
