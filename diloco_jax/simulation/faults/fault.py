"""Base of all faults, and the return of a coordinator after one."""

from __future__ import annotations

import msgspec


def _tag(name: str) -> str:
    """Return the tag of a class: `IslandCrash` -> "island_crash"."""
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
    """A fault of any kind. at_s: seconds from the start of the run.

    Each kind has `strike(world)`, which does or arms the fault, and returns False if
    there is nothing to strike just now. It calls `world.begun` once the fault really
    happens.
    """

    at_s: float

    @property
    def kind(self) -> str:
        """Name of the kind in JSON."""
        return str(self.__struct_config__.tag)

    @property
    def awaits_end(self) -> bool:
        """True if it happens only once the run has its tokens. Nobody waits for it to
        see that the run goes on."""
        return False


class Restart(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Return of a coordinator that died.

    down_s: seconds until it starts again.
    clock_s: reading of its monotonic clock at that start.
    noticed_s: seconds after which the islands see that their connections are broken.
    power_cut: its newest snapshot cannot be read, if there is one before it.
    workers_live: its workers, where it has several, go on without it, with the deltas
    that they have and those that are under way.
    """

    down_s: float
    clock_s: float = 0.0
    noticed_s: float = 0.0
    power_cut: bool = False
    workers_live: bool = False
