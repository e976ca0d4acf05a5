"""Begin with anchors of islands: a new term of a coordinator without its state, or a
run whose first parameters one island gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator import notes
from diloco_jax.coordinator.gatherer import Gathered, Gatherer
from diloco_jax.coordinator.holding.restoring import make_store
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.coordinator.settings import policy_of
from diloco_jax.core.fragments import FragmentPlan, Params
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol.coordinator import gathering
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.wire.server import Handlers

logger = logging.getLogger(__name__)


def gather(
    config: Config,
    workdir: Path,
    plan: FragmentPlan,
    serve: Callable[[Handlers], None],
    run_id: str = "",
) -> Gathered:
    """Wait for islands' anchors; write nothing.

    Args:
      run_id: the run that was lost; empty if nobody knows.
      serve: starts to answer islands' calls with the handlers that it is given.

    Raises:
      ConfigError: no island has the anchors; says why, and what can be done.
    """
    numbers = policy_of(config, plan, run_id)
    gatherer = Gatherer(config.run, numbers, plan, frozenset(config.islands))
    serve(gatherer)
    try:
        return gatherer.gather()
    except ConfigError as error:
        raise ConfigError(
            f"{workdir} holds no run (there is no run.json), and without --init "
            f"nothing is initialised; {error}. Give the workdir of the run, start its "
            f"islands, or give --init for a new one"
        ) from error


def first_given(
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    serve: Callable[[Handlers], None],
) -> Params:
    """Wait for the first parameters of the run from `placement.first_from`; write
    nothing.

    Raises ConfigError if they do not come in time: another start waits again.
    """
    giver = config.placement.first_from
    gatherer = Gatherer(config.run, policy, plan, frozenset((giver,)), new=True)
    serve(gatherer)
    return gatherer.gather().params


def begin(
    gathered: Gathered,
    config: Config,
    policy: PolicyConfig,
    plan: FragmentPlan,
    tape: Tape,
) -> tuple[Store, State]:
    """Make the state that the new term begins with: Theta = A, without momentum. The
    tape says so. The gathered parameters are cleared."""
    opened = gathered.opened
    store = make_store(config, plan, gathered.params)
    gathered.params.clear()  # As much as Theta, for as long as this process starts.
    for fragment, version in enumerate(opened.versions):
        store.load(fragment, store.arrays(fragment), version)
    tape.append(
        notes.dated(
            notes.Term(
                term=opened.term,
                run_id=opened.run_id,
                versions=tuple(opened.versions),
                sources=tuple(opened.sources),
                replaced=tuple(opened.replaced),
                tokens=opened.tokens,
                next_position=opened.next_position,
                fingerprint=policy.fingerprint,
                plan=plan.digest(),
                parameters_digest=store.digest(),
                environment=store.describe(),
            )
        )
    )
    logger.warning(
        "term %d of run %s begins with versions %s of islands %s",
        opened.term,
        opened.run_id,
        [tuple(version) for version in opened.replaced],
        sorted(set(opened.sources)),
    )
    return store, gathering.first_state(policy, opened)
