"""The policy's numbers, from a config."""

from __future__ import annotations

from diloco_jax.config import Placement, RunConfig
from diloco_jax.deadlines import Deadlines
from diloco_jax.policy.state import PolicyConfig


def policy_config(
    run: RunConfig,
    placement: Placement,
    run_id: str,
    fragment_sizes: tuple[int, ...],
) -> PolicyConfig:
    """fragment_sizes: parameters by fragment."""
    deadlines = Deadlines(placement.time_budget_s)
    return PolicyConfig(
        run_id=run_id,
        fingerprint=run.fingerprint(),
        fragment_sizes=fragment_sizes,
        steps_per_cycle=run.sync.steps_per_cycle,
        overlap_steps=run.sync.overlap_steps,
        quorum=run.sync.quorum,
        grace=run.sync.grace,
        max_staleness=run.sync.max_staleness,
        total_tokens=run.total_tokens,
        lease_s=deadlines.lease_s,
        compile_budget_s=placement.compile_budget_s,
        outage_budget_s=placement.outage_budget_s,
        flush_s=deadlines.flush_s,
    )
