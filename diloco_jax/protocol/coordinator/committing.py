"""Commit what a holder has prepared: record it, make it visible, tell the islands."""

from __future__ import annotations

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import alerts, fragments, leases
from diloco_jax.protocol.coordinator.events import Effect, Persist, Tell
from diloco_jax.protocol.coordinator.machines import ignored
from diloco_jax.protocol.coordinator.state import (
    Fragment,
    PolicyConfig,
    State,
    with_fragment,
)
from diloco_jax.protocol.holding import Commit, MergePrepared
from diloco_jax.protocol.messages import Published
from diloco_jax.protocol.values import Verdict

Step = tuple[State, list[Effect]]


def prepared(
    config: PolicyConfig, state: State, event: MergePrepared, now: float
) -> Step:
    """Commit the merge under way of a fragment, now that it is prepared."""
    fragment = state.fragments[event.fragment]
    if fragment.phase != "merging" or event.version != fragment.version.next():
        return state, [ignored("fragment", fragment.phase, "merge")]
    contributions, tick = fragment.merging, fragment.tick
    share = fragment.merging_share
    fragment, verdicts, effects = fragments.computed(
        config, fragment, state.islands.standing.counted, now
    )
    state = leases.contributed(with_fragment(state, fragment), contributions)
    record = records.Merged(
        fragment=event.fragment,
        version=event.version,
        tick=tick,
        final=fragment.final,
        contributions=contributions,
        share=share,
        verdicts=verdicts,
        digest=event.prepared.digest,
        payload_bytes=event.prepared.payload_bytes,
    )
    raised = alerts.after_merge(fragment, contributions, state.islands.standing.counted)
    raised += alerts.in_turns(config, state, fragment)
    visible = committed(state, fragment, record, verdicts)
    return state, visible + effects + raised


def committed(
    state: State,
    fragment: Fragment,
    record: records.Merged | records.TermBegun,
    verdicts: dict[str, tuple[int, Verdict, str]],
) -> list[Effect]:
    """Record the fragment's new version, make it visible, and tell every island of it
    and of the verdict on its take. The order is that of durability."""
    effects: list[Effect] = [
        Persist(record=record),
        Commit(fragment=fragment.index, version=fragment.version),
    ]
    for name, island in state.islands.items():
        if island.status == "gone":
            continue
        tick, verdict, reason = verdicts.get(name, (-1, "none", ""))
        published = Published(
            fragment=fragment.index,
            version=fragment.version,
            tick=tick,
            verdict=verdict,
            reason=reason,
        )
        effects.append(Tell(session=island.session, message=published))
    return effects
