"""The fields of a config that name a member of an open family."""

from __future__ import annotations

from typing import Any

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.core.adopt import RULES as ADOPT_RULES
from diloco_jax.core.codecs import CODECS
from diloco_jax.core.members import Family
from diloco_jax.core.merge import RULES as MERGE_RULES
from diloco_jax.core.outer import OPTIMIZERS
from diloco_jax.core.weighting import WEIGHTINGS

FIELDS: dict[str, Family[Any]] = {
    "sync.weighting": WEIGHTINGS,
    "sync.merge": MERGE_RULES,
    "sync.adopt": ADOPT_RULES,
    "sync.codec_up": CODECS,
    "sync.codec_down": CODECS,
    "outer.optimizer": OPTIMIZERS,
}


def check_members(run: RunConfig) -> None:
    """Raises ConfigError if a field names no member, or one from outside the package
    that fails on a tiny piece. Names the field, and the line at fault."""
    for field, family in FIELDS.items():
        section, name = field.split(".")
        value = getattr(getattr(run, section), name)
        if value is not None:
            check_member(field, family, value)


def check_member(field: str, family: Family[Any], name: str) -> None:
    """The same of one field."""
    try:
        family.check(name)
    except ValueError as error:
        raise ConfigError(f"{field} = {name!r}: {error}") from error
