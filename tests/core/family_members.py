"""Which members the contract tests are for: all that a family's table has, and those
that benchmarks measure beside them (`benchmarks/members/FAMILY/NAME.py:NAME`)."""

from pathlib import Path
from typing import Any

from diloco_jax.core.members import Family

MEASURED = Path(__file__).parents[2] / "benchmarks" / "members"


def names(family: Family[Any], folder: str) -> list[str]:
    """The names by which a config may ask for them."""
    files = sorted((MEASURED / folder).glob("[!_]*.py"))
    return [*family.table, *(f"{path}:{path.stem}" for path in files)]


def brief(name: str) -> str:
    """Return a member's short name, for the name of a test."""
    return name.rpartition(":")[2]
