"""Make a holder's fragments: for a new run or term, or from its disk after a crash."""

from __future__ import annotations

from collections.abc import Container, Iterator

from rich.console import Console

from diloco_jax import merge_route, storage
from diloco_jax.config import Config
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.fragments import FragmentPlan, Params, get_piece
from diloco_jax.machine import give_memory_back
from diloco_jax.observability.terminal import bar
from diloco_jax.protocol.holding import (
    Committed,
    FragmentsRestored,
    LostFragment,
    RestoredFragment,
    RestoreFragments,
)
from diloco_jax.protocol.values import Version


def make_store(config: Config, plan: FragmentPlan, params: Params | None) -> Store:
    """Return the store of a coordinator's holder; see `Store`. Parameters of files are
    read here, a fragment at a time, which the progress shows."""
    placement = config.placement
    passes = merge_route.passes_of(placement.merge_route)
    store = Store(config.run, plan, None, placement.deadlines.reunion_s, passes)
    if params is None:
        return store
    with bar(Console(stderr=True), "reading the first parameters") as report:
        for fragment, pieces in enumerate(plan.fragments):
            values = [get_piece(params, piece) for piece in pieces]
            store.load(fragment, store.first(fragment, values), Version())
            report((fragment + 1) / len(plan.fragments))
    return store


def restore(
    asked: RestoreFragments,
    store: Store,
    snapshots: FragmentSnapshots,
    publishes: Publishes,
) -> FragmentsRestored:
    """Bring every fragment to the version that the lead's log has committed. Delete the
    publishes beyond it: their merges never were.

    A fragment of which no snapshot reads, or a committed publish is missing or damaged,
    is lost. Raises ConfigError for a snapshot of another run, and StorageAway if a
    bucket does not answer.
    """
    committed = asked.fragments
    discarded = publishes.discard({c.fragment: c.version for c in committed})
    found, lost = [], []
    with bar(Console(stderr=True), "restoring the fragments") as report:
        for done, fragment in enumerate(committed, start=1):
            try:
                found.append(_restored(fragment, store, snapshots, publishes))
            except (storage.SealedError, durable.DurableError) as error:
                lost.append(LostFragment(fragment=fragment.fragment, why=str(error)))
            give_memory_back()
            report(done / len(committed))
    return FragmentsRestored(
        fragments=tuple(found),
        lost=tuple(lost),
        discarded=discarded,
        environment=store.describe(),
    )


def alive(
    asked: RestoreFragments, store: Store, lost: Container[int]
) -> Iterator[RestoredFragment]:
    """Yield the fragments of a holder that has outlived its lead, without those that it
    had lost. Raises DurableError if one is not at its committed version."""
    for committed in asked.fragments:
        fragment, version = committed.fragment, committed.version
        if fragment in lost:
            continue
        here, _ = store.current(fragment)
        if here != version:
            raise durable.DurableError(
                f"fragment {fragment} is at version {tuple(here)} at its worker, and "
                f"the log is at {tuple(version)}"
            )
        yield RestoredFragment(
            fragment=fragment,
            snapshot=version,
            moved=False,
            digest=store.digest_of(fragment),
        )


def _restored(
    committed: Committed,
    store: Store,
    snapshots: FragmentSnapshots,
    publishes: Publishes,
) -> RestoredFragment:
    """Load a fragment from its newest snapshot that can be read, and apply its later
    publishes.
    """
    fragment, through = committed.fragment, committed.version
    begin, arrays = snapshots.load(fragment, through, store.like(fragment))
    if begin.term != through.term:
        raise durable.DurableError(
            f"the newest snapshot of fragment {fragment} is of version {tuple(begin)}, "
            f"the log is at {tuple(through)}: it is of another term; restore the "
            f"workdir from a copy"
        )
    store.load(fragment, arrays, begin)
    version, moved = begin, False
    while version < through:
        version = version.next()
        payload, final = publishes.read(
            fragment, version, committed.digests.get(version.number)
        )
        store.replay(fragment, version, payload, final=final)
        store.put_aside(fragment, publishes.mapped)
        moved |= not final
    return RestoredFragment(
        fragment=fragment,
        snapshot=begin,
        moved=moved,
        digest=store.digest_of(fragment),
    )
