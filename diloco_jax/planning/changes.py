"""Changes of a config's fields, by their names in messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco_jax.config import Config

Change = Mapping[str, Any]
"""Values by field: "sync.steps_per_cycle", "islands.NAME.batch_size"."""


def changed(config: Config, change: Change) -> Config:
    """Return a config with other values of these fields."""
    for path, value in change.items():
        section, _, rest = path.partition(".")
        name, _, field = rest.rpartition(".")
        new = {field: value}
        if section == "islands":
            island = dataclasses.replace(config.islands[name], **new)
            islands = {**config.islands, name: island}
            config = dataclasses.replace(config, islands=islands)
        elif section == "sync":
            sync = dataclasses.replace(config.run.sync, **new)
            run = dataclasses.replace(config.run, sync=sync)
            config = dataclasses.replace(config, run=run)
        else:
            part = dataclasses.replace(getattr(config, section), **new)
            config = dataclasses.replace(config, **{section: part})
    return config


def shown(change: Change) -> str:
    """Format the change as fields and values."""
    return " and ".join(f"{path} = {_value(value)}" for path, value in change.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)
