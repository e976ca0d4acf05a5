"""What breaks a primary or a standby on purpose; see `plants`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace


def believed_forever(confirmed: Callable[..., Any]) -> Callable[..., Any]:
    """Let a primary count on its mandate for good once it was written."""

    def broken(state: Any, asked: Any) -> Any:
        return confirmed(replace(state, valid_until=math.inf), asked)

    return broken


def nothing_waits(gated: object) -> Any:
    """Let everything be seen that the standby does not have."""
    return ()
