"""Comparison of two configs: the fields that count, and their differences."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint(config: Any) -> str:
    """Return 16 hex digits over every field that is not local to a machine."""
    text = json.dumps(shared_fields(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shared_fields(config: Any) -> dict[str, Any]:
    """Return a dataclass as nested builtins, without the fields local to a machine.

    A whole number in a field of floats is a float, as it is when `config.json` is
    read.
    """
    shared: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.metadata.get("local"):
            continue
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = shared_fields(value)
        elif isinstance(value, tuple):
            # JSON and messages give lists.
            value = [list(v) if isinstance(v, tuple) else v for v in value]
        elif field.metadata.get("code") and value is not None:
            value = value.rpartition("/")[2]
        elif isinstance(value, int) and "float" in str(field.type):
            value = float(value)
        shared[field.name] = value
    return shared


def differences(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    where: tuple[str, str] = ("here", "there"),
) -> list[str]:
    """List `field: ours here, theirs there` for every leaf in which two differ. where:
    the words for the two."""
    found = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += [f"{name}.{line}" for line in differences(a, b, where)]
        elif a != b:
            found.append(f"{name}: {a!r} {where[0]}, {b!r} {where[1]}")
    return found
