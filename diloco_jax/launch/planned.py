"""Ask the plan before anything is paid for: would the coordinator's machine do?

Steps are not known without a compiler, so a launch is refused only for what does not
depend on them: memory, places at the bulk port, and the least bytes of the disk.
Snapshots alone never ask for more than the disk's rate, as they pause. What arithmetic
at peak rates refuses beyond that is a note. `diloco plan` knows the rest.
"""

from __future__ import annotations

from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.hardware.rates import constants_of
from diloco_jax.hardware.slices import slice_of
from diloco_jax.planning.changes import shown
from diloco_jax.planning.checks import refusals
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.terms import Terms

OF_NO_STEP = frozenset({"memory", "merge buffer", "places", "disk bytes"})
"""Checks of the plan that do not depend on the islands' speed."""
SLOW_STEP_S = 3600.0
"""Step so long that no other check refuses."""


def require_planned(config: Config) -> list[str]:
    """Return notes on what arithmetic refuses at peak rates, and what would mend it.

    Raises ConfigError if the coordinator's machine or its disk is too small for the
    run, however slow its steps are."""
    import jax

    # The laptop's devices play no part.
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    from diloco_jax.planning.arithmetic import plan_by_arithmetic
    from diloco_jax.planning.report import fragments_of

    fragments, link = fragments_of(config), Assumptions().link_gbit_per_s
    terms = Terms(
        config=resolve_outer(config),
        fragments=fragments,
        hosts={n: slice_of(n, island).hosts for n, island in config.islands.items()},
        step_seconds=dict.fromkeys(config.islands, SLOW_STEP_S),
        link_gbit_per_s=link,
        steps_known=False,
    )
    wrong = [found.text for found in refusals(terms) if found.check in OF_NO_STEP]
    if wrong:
        raise ConfigError(
            f"{'; '.join(wrong)}; or give --unplanned to launch it all the same"
        )
    if config.run.model.factory:
        return []  # Nobody knows its FLOPs before it is compiled.
    rates = constants_of(config.placement.merge_route)
    plan = plan_by_arithmetic("", config, fragments, link, {}, rates)
    notes = [f"plan at peak rates, REFUSED: {r.text}" for r in plan.refusals]
    if len(notes) > 1 and plan.mending:
        notes.append(f"all of them together: set {shown(plan.mending)}")
    return notes
