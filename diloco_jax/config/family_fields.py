"""The fields of a config that name a member of an open family.

A member from outside the package is tried on a tiny piece before anything starts. That
is done in a separate process on the CPU, since this process may not have told JAX yet
which platform to use.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

from diloco_jax.core.families import (
    ADOPT_RULES,
    CODECS,
    MERGE_RULES,
    OUTER_OPTIMIZERS,
    WEIGHTINGS,
)
from diloco_jax.core.members import Family, importable
from diloco_jax.errors import ConfigError

FIELDS: dict[str, Family[Any]] = {
    "sync.weighting": WEIGHTINGS,
    "sync.merge": MERGE_RULES,
    "sync.adopt": ADOPT_RULES,
    "sync.codec_up": CODECS,
    "sync.codec_down": CODECS,
    "outer.optimizer": OUTER_OPTIMIZERS,
}
TRIAL = "from diloco_jax.config.family_fields import try_members; try_members()"
"""Program of the separate process."""
TRIAL_S = 300.0
"""Longest time for trying the members of a config."""

Named = tuple[tuple[str, str], ...]
"""Pairs of a field and the member's name in it."""


def check_members(run: object) -> None:
    """Raise ConfigError if a field names no member, or one from outside the package
    that fails on a tiny piece. The error names the field, and the line at fault.

    run: a `RunConfig`, whose file imports none of the families.
    """
    outside = []
    for field, family in FIELDS.items():
        section, attribute = field.split(".")
        name = getattr(getattr(run, section), attribute)
        if name is None or name in family.table:
            continue
        if ":" not in name and not family.otherwise:
            check_member(field, family, name)
        outside.append((field, name))
    if outside and (wrong := _try(tuple(outside), os.getcwd())):
        raise ConfigError(wrong)


def check_member(field: str, family: Family[Any], name: str) -> None:
    """Raise ConfigError, naming the field, unless the family has that member."""
    try:
        family.check(name)
    except ValueError as error:
        raise ConfigError(f"{field} = {name!r}: {error}") from error


@functools.cache
def _try(named: Named, folder: str) -> str:
    """Try these members; return the message about the first that fails, or "".

    folder: the folder that relative paths start from."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", TRIAL, json.dumps(named)],
            env={**os.environ, **importable(), "JAX_PLATFORMS": "cpu"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TRIAL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{_brief(named)}: trying it on a tiny piece took over {TRIAL_S:g} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return (
            f"{_brief(named)}: trying it on a tiny piece ended with exit code "
            f"{done.returncode} ({last})"
        )
    # Output of the member itself comes before this line.
    wrong: str = json.loads(done.stdout.splitlines()[-1])
    return wrong


def _brief(named: Named) -> str:
    return ", ".join(f"{field} = {name!r}" for field, name in named)


def try_members() -> None:
    """Try the members of the command line; print the message about the first that
    fails, or "", as JSON."""
    try:
        for field, name in json.loads(sys.argv[1]):
            check_member(field, FIELDS[field], name)
    except ConfigError as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps(""))
