"""Choices made once, when a run is created: digest, cycle, outer optimizer, absolute
paths.

A config that leaves them open gets its cycle and overlap by the run's steps, and its
outer optimizer by merges per fragment. The measurements behind every number are in
docs/design/outer_presets.md.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, TypeVar

from diloco_jax.config.config import Config, with_paths
from diloco_jax.config.fields import own_code
from diloco_jax.config.run import OuterConfig, RunConfig, SyncConfig, read_init
from diloco_jax.files import absolute

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Any)
Section = TypeVar("Section", SyncConfig, OuterConfig)


def resolve(
    config: Config, *, text_is_here: bool = False, copied: bool = False
) -> Config:
    """Fill in the fields that are decided once per run: the data's digest and arrays,
    the digest of frozen weights, cycle and outer optimizer. Make paths absolute.

    Fields that are set stay as they are, so resolving twice changes nothing. Reads the
    corpus if its digest is unknown or if it must be on this machine. Raises ConfigError
    if the corpus cannot be read, differs from the digest, or is too short for the run.
    copied: the files are copies, and their manifests are believed (`load_corpus`).
    """
    config = with_absolute_paths(config)
    run = config.run
    if text_is_here or not run.data.digest:
        from diloco_jax.data.loading import load_data, require_vocabulary
        from diloco_jax.data.pictures import RowPictures

        found = load_data(run, copied=copied)
        require_vocabulary(found, run)
        pictures = found.pictures or RowPictures()
        data = dataclasses.replace(
            run.data,
            digest=found.digest,
            arrays=found.arrays,
            weights=found.weights or run.data.weights,
            pictures=pictures.most,
            picture_tokens=pictures.tokens,
            picture_token=pictures.token,
        )
        run = dataclasses.replace(run, data=data)
    leaves = run.model.lora_rank or run.model.train or run.model.factory
    if leaves and not run.model.frozen_digest:
        from diloco_jax.models.build import build

        if (frozen := build(run).frozen) is not None:
            model = dataclasses.replace(run.model, frozen_digest=frozen.digest())
            run = dataclasses.replace(run, model=model)
    return resolve_open(dataclasses.replace(config, run=run))


def resolve_open(config: Config) -> Config:
    """Fill in the open fields of the cycle, by `cycle`, and of the outer optimizer, by
    `preset`."""
    run, from_weights = config.run, bool(config.run.model.weights)
    if is_open(run.sync):
        chosen, least = LONG, 2 * (run.sync.overlap_steps or 0)
        if run.sync.steps_per_cycle is None:
            chosen = cycle(config.steps(), least, from_weights=from_weights)
        run = dataclasses.replace(run, sync=filled(run.sync, chosen))
    if is_open(run.outer):
        from diloco_jax.core.families import MERGE_RULES

        outer = preset(
            from_weights=from_weights,
            merges_per_fragment=config.steps() / run.sync.cycle,
            steps_per_cycle=run.sync.cycle,
            islands=len(config.islands),
            keeps_length=MERGE_RULES.find(run.sync.merge).keeps_length,
            inner=run.inner.optimizer,
        )
        run = dataclasses.replace(run, outer=filled(run.outer, outer))
    return dataclasses.replace(config, run=run)


def is_open(section: SyncConfig | OuterConfig) -> bool:
    """Tell whether something is left to be filled in when the run is created."""
    return any(value is None for value in vars(section).values())


def filled(section: Section, chosen: Section) -> Section:
    """Fill the fields that a section leaves open from `chosen`."""
    own = {name: value for name, value in vars(section).items() if value is not None}
    return dataclasses.replace(chosen, **own)


def with_model_of(run: RunConfig, config: Config) -> Config:
    """Return the config with the model of a run that started from weights.

    The weights' config.json decided that model. If the run has no weights, or if the
    config names weights or a factory itself, the config keeps its own model.
    """
    own = config.run.model
    if not run.model.weights or own.weights or own.factory:
        return config
    logger.info(
        "the model is that of %s, which the run started from", run.model.weights
    )
    changed = dataclasses.replace(config.run, model=run.model)
    return dataclasses.replace(config, run=changed)


def with_choices_of(run: RunConfig, config: Config) -> Config:
    """Return the config with the cycle and the outer optimizer of a run that goes on,
    where it leaves them open: other tokens or islands would choose others."""
    own = config.run
    sync, outer = filled(own.sync, run.sync), filled(own.outer, run.outer)
    changed = dataclasses.replace(own, sync=sync, outer=outer)
    return dataclasses.replace(config, run=changed)


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, which mean the same in any folder."""
    config = with_paths(config, absolute)
    run = config.run
    weights = ":".join(read_init(run.model.weights)) if run.model.weights else ""
    run = dataclasses.replace(
        run,
        data=_with_absolute_code(run.data),
        model=dataclasses.replace(_with_absolute_code(run.model), weights=weights),
        sync=_with_absolute_code(run.sync),
        outer=_with_absolute_code(run.outer),
        inner=_with_absolute_code(run.inner),
    )
    return dataclasses.replace(config, run=run)


def _with_absolute_code(section: T) -> T:
    """Return a section of a config with absolute paths to the files that it names."""
    code = {name: absolute(value) for name, value in own_code(section).items()}
    replaced: T = dataclasses.replace(section, **code)
    return replaced


LONG = SyncConfig(steps_per_cycle=24, overlap_steps=2)
"""Cycle and overlap of a long run, and of one that starts from trained weights, which
moves little."""
SHORTEST_CYCLE, OVERLAPPED_ONCE = 4, 12
"""Steps of the shortest cycle that is chosen, and below which a second step of overlap
costs more than it hides."""
MERGES = 500.0
"""Merges of each fragment that a run gets, if a cycle within these lengths gives them.
"""


def cycle(steps: float, least: int = 0, *, from_weights: bool = False) -> SyncConfig:
    """Choose cycle and overlap of a run: the shorter the run, the more is lost by what
    islands do apart, and the fewer bytes a shorter cycle costs in all.

    Args:
      steps: of each island, if all are equally fast.
      least: steps that the cycle has in any case, since an overlap was given.
      from_weights: the run starts from trained weights.
    """
    length = math.ceil(max(steps / MERGES, SHORTEST_CYCLE, least))
    if from_weights or length >= LONG.cycle:
        return LONG
    overlap = 1 if length < OVERLAPPED_ONCE else LONG.overlap
    return SyncConfig(steps_per_cycle=length, overlap_steps=overlap)


SHORT = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
"""Preset for runs of few merges, in which momentum was no better, or worse."""

GENTLE = OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
"""Preset whose momentum goes exactly as far as the islands went, 0.4 / (1 - 0.6)."""
GENTLE_FROM_MERGES = 80.0
GENTLE_FROM_MERGES_OF = {"muon": 160.0}
"""Merges from which momentum helps, for inner optimizers that need more of them."""
GENTLE_FROM_STEPS, GENTLE_FROM_CYCLE = 1600.0, 4
"""Steps from which it helps, however many merges they have, and the shortest cycle in
which it was measured."""

PUBLISHED_MOMENTUM = 0.9
PUBLISHED_RATES = ((1, 0.4), (4, 0.6), (math.inf, 0.8))
"""(most islands, outer learning rate) for the plain mean (arXiv 2503.09799)."""
PUBLISHED_FROM_MERGES = 200.0
PUBLISHED_FROM_STEPS = 24
"""Shortest cycle in steps: in a shorter one successive deltas are alike, and momentum
adds them up to several times the islands' own distance."""


def preset(
    *,
    merges_per_fragment: float,
    steps_per_cycle: int,
    islands: int,
    keeps_length: bool,
    inner: str,
    from_weights: bool = False,
) -> OuterConfig:
    """Choose the outer optimizer of a run.

    Args:
      from_weights: the run starts from trained weights. It then gets no momentum, which
        would carry it away from them.
      keeps_length: the merge rule's `keeps_length`.
      inner: name of the inner optimizer.
    """
    if (
        from_weights
        or merges_per_fragment < GENTLE_FROM_MERGES_OF.get(inner, GENTLE_FROM_MERGES)
        or merges_per_fragment * steps_per_cycle < GENTLE_FROM_STEPS
        or steps_per_cycle < GENTLE_FROM_CYCLE
    ):
        return SHORT
    if (
        keeps_length
        or merges_per_fragment < PUBLISHED_FROM_MERGES
        or steps_per_cycle < PUBLISHED_FROM_STEPS
    ):
        return GENTLE
    rate = next(rate for up_to, rate in PUBLISHED_RATES if islands <= up_to)
    return OuterConfig(
        optimizer="nesterov", learning_rate=rate, momentum=PUBLISHED_MOMENTUM
    )
