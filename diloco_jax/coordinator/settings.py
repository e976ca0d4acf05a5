"""The numbers of policy and outer optimizer, from a config."""

from __future__ import annotations

from diloco_jax.config import Config, ConfigError, Placement, RunConfig
from diloco_jax.core.codecs.codec import get_codec
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.outer.optimizer import OuterSettings
from diloco_jax.core.payload import PayloadLayout
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
        awaits_alike=run.sync.grace_window == "alike",
        max_staleness=run.sync.max_staleness,
        scale_partial_merges=run.sync.partial_merges == "scaled",
        total_tokens=run.total_tokens,
        lease_s=deadlines.lease_s,
        reunion_s=deadlines.reunion_s,
        compile_budget_s=placement.compile_budget_s,
        outage_budget_s=placement.outage_budget_s,
        flush_s=deadlines.flush_s,
    )


def require_room(config: Config, plan: FragmentPlan) -> None:
    """Raises ConfigError if the deltas of all islands for one fragment do not find
    room: at the end of a run it is merged from all of them."""
    codec = get_codec(config.run.sync.codec_up)
    largest = max(PayloadLayout.of(codec, p).total_bytes for p in plan.fragments)
    needed = largest * len(config.islands)
    if config.placement.merge_buffer_bytes < needed:
        raise ConfigError(
            f"placement.merge_buffer_bytes = {config.placement.merge_buffer_bytes}, "
            f"but deltas of the largest fragment have {largest} bytes each "
            f"(sync.codec_up = {codec.name!r}), and there are {len(config.islands)} "
            f"islands; give at least {needed}, or more sync.fragments"
        )


def outer_settings(run: RunConfig) -> OuterSettings:
    """The outer optimizer of a resolved config."""
    chosen = run.outer
    if chosen.optimizer is None or chosen.learning_rate is None:
        raise ValueError(
            "outer.optimizer and outer.learning_rate are not resolved; use the "
            "config.json of the run"
        )
    return OuterSettings(
        optimizer=chosen.optimizer,
        learning_rate=chosen.learning_rate,
        momentum=chosen.momentum or 0.0,
        warmup_merges=chosen.warmup_merges,
        norm_guard=chosen.norm_guard,
    )
