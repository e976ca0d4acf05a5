"""What all kinds of faults have, and how a coordinator comes back after one."""

from __future__ import annotations

import msgspec


def _tag(name: str) -> str:
    """`IslandCrash` -> "island_crash"."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class DrawnFault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=_tag,
):
    """What all kinds have. at_s: seconds from the begin of the run.

    Each has `strike(world)`, which does it, or arms it, and returns False if there is
    nothing to strike just now. It calls `world.begun` once it really happens.
    """

    at_s: float

    @property
    def kind(self) -> str:
        """Its name in JSON."""
        return str(self.__struct_config__.tag)


class Restart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """How a coordinator that died comes back.

    clock_s: what its monotonic clock says then.
    noticed_s: after which the islands see that their connections are broken.
    power_cut: its newest snapshot does not read, if there is one before it.
    """

    down_s: float
    clock_s: float = 0.0
    noticed_s: float = 0.0
    power_cut: bool = False
