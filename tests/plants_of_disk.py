"""Bugs planted between a coordinator and its disk; see `plants`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_jax.protocol.holding import MergePrepared
from diloco_jax.simulation.faults.disk import Disk
from diloco_jax.simulation.virtual.coordinator import VirtualCoordinator


def _has_always_space(has_space: Callable[..., Any]) -> Callable[..., Any]:
    return lambda disk: True


def _says_prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def broken(coordinator: Any, merge: Any, prepared: Any) -> Any:
        if not coordinator.dead:
            coordinator._written(merge, prepared)
            coordinator.hear(
                MergePrepared(
                    fragment=merge.fragment, version=merge.version, prepared=prepared
                )
            )

    return broken


def _forgets_all(forget: Callable[..., Any]) -> Callable[..., Any]:
    def broken(disk: Any, fragment: int, through: Any) -> Any:
        forget(disk, fragment, disk.saved(fragment)[-1])

    return broken


def _counts_what_was_prepared(restore: Callable[..., Any]) -> Callable[..., Any]:
    def broken(disk: Any, committed: Any) -> Any:
        found = enumerate(committed)
        return restore(disk, [max([*disk.published(f), v]) for f, v in found])

    return broken


DISK_PLANTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "a_full_disk_counts_as_written": (
        "prepared",
        VirtualCoordinator,
        "_prepare",
        _says_prepared,
    ),
    "publishes_go_with_the_newest_snapshot": ("chains", Disk, "forget", _forgets_all),
    "a_record_without_space_counts_as_written": (
        "data",
        Disk,
        "has_space",
        _has_always_space,
    ),
    "a_prepared_merge_is_restored": (
        "restored",
        Disk,
        "restore",
        _counts_what_was_prepared,
    ),
}
