"""Every number that a peer says is bounded, and docs/security.md says by what."""

from __future__ import annotations

from pathlib import Path

import pytest
from numbers_said import numbers_of

from diloco_jax.protocol import messages
from diloco_jax.wire import bulk

SAID = (
    messages.FromIsland,
    messages.Steer,
    messages.ProfileOrder,
    bulk.Request,
)
"""Messages of islands, readers and operators."""
CHECKED = {
    ("Hello", "run"),
    ("Hello", "island_config"),
    ("Hello", "environment"),
    ("Record", "value"),
    ("Record", "unheard"),
    ("Measures", "loss"),
    ("Measures", "losses_by_source"),
    ("Measures", "adoption_loss"),
    ("Measures", "eval_loss"),
    ("Measures", "watched_loss"),
    ("Box", "piece"),
    ("Box", "start"),
    ("Box", "stop"),
}
"""Numbers with other bounds than one of their type, which the page names."""
PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def said() -> list[tuple[str, str, float | None]]:
    return sorted({n for kind in SAID for n in numbers_of(kind)}, key=str)


@pytest.mark.parametrize(("owner", "field", "most"), said())
def test_a_number_has_a_bound_and_a_row(
    owner: str, field: str, most: float | None
) -> None:
    assert most is not None or (owner, field) in CHECKED
    text = PAGE.read_text()
    table = text.split("## Every number that a peer says")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    named = [row for row in rows if owner in row[1] and f"`{field}`" in row[2]]
    assert len(named) == 1, f"{owner}.{field} has {len(named)} rows"
