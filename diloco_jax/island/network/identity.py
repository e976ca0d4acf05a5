"""Identity of an island's process, on every bulk message."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """`session` is drawn once per process; the launcher counts `incarnation`."""

    run_id: str
    island: str
    incarnation: int
    session: str

    def fields(self) -> dict[str, Any]:
        """Return keyword arguments of `UploadStart` and `FetchRequest`."""
        return dataclasses.asdict(self)
