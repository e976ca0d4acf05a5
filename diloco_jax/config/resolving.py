"""What a run decides once, when it is created: digest, outer optimizer, whole paths."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.config import Config
from diloco_jax.config.presets import preset
from diloco_jax.paths import absolute


def resolve(config: Config, *, text_is_here: bool = False) -> Config:
    """Fill in the corpus digest and the outer optimizer, and make paths absolute.

    Other fields that are set are left alone, so resolving twice changes nothing. Reads
    the corpus if its digest is not known, or it must be on this machine; raises
    ConfigError if it cannot, if it is another one, or too short for the run.
    """
    config = with_absolute_paths(config)
    run = config.run
    if text_is_here or not run.data.digest:
        from diloco_jax.data import corpus as text

        corpus = text.load_checked_corpus(run.data)
        text.require_window(len(corpus.train), run.sequence_length)
        text.require_prediction(len(corpus.validation))
        text.require_vocabulary(corpus, run.model)
        data = dataclasses.replace(run.data, digest=corpus.digest)
        run = dataclasses.replace(run, data=data)
    return resolve_outer(dataclasses.replace(config, run=run))


def resolve_outer(config: Config) -> Config:
    """Fill in what the outer optimizer leaves open, from `presets`."""
    outer = config.run.outer
    if not outer.is_open:
        return config
    chosen = preset(
        merges_per_fragment=config.merges_per_fragment(),
        steps_per_cycle=config.run.sync.steps_per_cycle,
        islands=len(config.islands),
        merge=config.run.sync.merge,
        inner=config.run.inner.optimizer,
    )
    run = dataclasses.replace(config.run, outer=outer.filled(chosen))
    return dataclasses.replace(config, run=run)


def with_absolute_paths(config: Config) -> Config:
    """Return the config as it reads from any folder."""
    placement = dataclasses.replace(
        config.placement,
        workdir=absolute(config.placement.workdir),
        certificates=absolute(config.placement.certificates),
        checkpoints=absolute(config.placement.checkpoints),
    )
    run = config.run
    data = dataclasses.replace(run.data, paths=tuple(map(absolute, run.data.paths)))
    model = run.model
    if ".py:" in model.factory:
        model = dataclasses.replace(model, factory=absolute(model.factory))
    run = dataclasses.replace(run, data=data, model=model)
    return dataclasses.replace(config, run=run, placement=placement)
