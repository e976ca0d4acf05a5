"""Choices made once, when a run is created: digest, outer optimizer, absolute paths."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, TypeVar

from diloco_jax.config.config import Config
from diloco_jax.config.fields import own_code
from diloco_jax.config.model import ModelConfig
from diloco_jax.config.presets import preset
from diloco_jax.config.run import RunConfig
from diloco_jax.files import absolute

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Any)


def resolve(
    config: Config, *, text_is_here: bool = False, copied: bool = False
) -> Config:
    """Fill in the fields that are decided once per run: the data's digest and arrays,
    the digest of frozen weights and the outer optimizer. Make paths absolute.

    Fields that are set stay as they are, so resolving twice changes nothing. Reads the
    corpus if its digest is unknown or if it must be on this machine. Raises ConfigError
    if the corpus cannot be read, differs from the digest, or is too short for the run.
    copied: the files are copies, and their manifests are believed (`load_corpus`).
    """
    config = with_absolute_paths(config)
    run = config.run
    if text_is_here or not run.data.digest:
        from diloco_jax.data.loading import load_data, require_vocabulary

        found = load_data(run, copied=copied)
        require_vocabulary(found, run)
        data = dataclasses.replace(
            run.data,
            digest=found.digest,
            arrays=found.arrays,
            weights=found.weights or run.data.weights,
        )
        run = dataclasses.replace(run, data=data)
    if (run.model.lora_rank or run.model.factory) and not run.model.frozen_digest:
        from diloco_jax.models.build import build

        if (frozen := build(run).frozen) is not None:
            model = dataclasses.replace(run.model, frozen_digest=frozen.digest())
            run = dataclasses.replace(run, model=model)
    return resolve_outer(dataclasses.replace(config, run=run))


def resolve_outer(config: Config) -> Config:
    """Fill in the open fields of the outer optimizer, from `presets`."""
    outer = config.run.outer
    if not outer.is_open:
        return config
    from diloco_jax.core.families import MERGE_RULES

    chosen = preset(
        from_weights=bool(config.run.model.weights),
        merges_per_fragment=config.merges_per_fragment(),
        steps_per_cycle=config.run.sync.steps_per_cycle,
        islands=len(config.islands),
        keeps_length=MERGE_RULES.find(config.run.sync.merge).keeps_length,
        inner=config.run.inner.optimizer,
    )
    run = dataclasses.replace(config.run, outer=outer.filled(chosen))
    return dataclasses.replace(config, run=run)


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


def with_absolute_paths(config: Config) -> Config:
    """Return the config with absolute paths, which mean the same in any folder."""
    placement = dataclasses.replace(
        config.placement,
        workdir=absolute(config.placement.workdir),
        certificates=absolute(config.placement.certificates),
        checkpoints=absolute(config.placement.checkpoints),
    )
    run = config.run
    data = dataclasses.replace(
        run.data,
        paths=tuple(map(absolute, run.data.paths)),
        tokenizer=absolute(run.data.tokenizer),
    )
    run = dataclasses.replace(
        run,
        data=_with_absolute_code(data),
        model=_with_absolute_source(_with_absolute_code(run.model)),
        sync=_with_absolute_code(run.sync),
        outer=_with_absolute_code(run.outer),
    )
    return dataclasses.replace(config, run=run, placement=placement)


def _with_absolute_source(model: ModelConfig) -> ModelConfig:
    kind, colon, folder = model.weights.partition(":")
    return dataclasses.replace(model, weights=f"{kind}{colon}{absolute(folder)}")


def _with_absolute_code(section: T) -> T:
    """Return a section of a config with absolute paths to the files that it names."""
    code = {name: absolute(value) for name, value in own_code(section).items()}
    replaced: T = dataclasses.replace(section, **code)
    return replaced
