"""The adopt rules, by value."""

import numpy as np
import pytest

from diloco_jax.core.changes import REBASE, adopt, moved
from diloco_jax.core.families import ADOPT_RULES

LOCAL, BASE = np.float32([5.0, 1.0]), np.float32([4.0, 1.0])
ANCHOR = np.float32([10.0, 20.0])


@pytest.mark.parametrize(
    ("rule", "alpha", "expected"),
    [
        ("keep", 0.5, [11.0, 20.0]),
        ("rebase", 0.5, [11.0, 20.0]),
        ("overwrite", 0.5, [10.0, 20.0]),
        ("blend", 0.75, [6.25, 5.75]),
        ("blend", 0.0, [10.0, 20.0]),
        ("blend", 1.0, [5.0, 1.0]),
    ],
)
def test_rules(rule: str, alpha: float, expected: list[float]) -> None:
    result = adopt(ADOPT_RULES.find(rule), LOCAL, BASE, ANCHOR, alpha)
    np.testing.assert_array_equal(result, expected)


def test_a_kept_delta_leaves_with_the_version_that_has_it() -> None:
    """Adopted beside it, and then in its place: as if both had come at once."""
    between = np.float32([7.0, -3.0])
    first = np.float32([6.0, 1.0])
    local, base = (moved(x, first, between) for x in (LOCAL, BASE))
    np.testing.assert_array_equal(local, [6.0, -3.0])
    np.testing.assert_array_equal(local - base, LOCAL - BASE)
    at_last = adopt(REBASE, local, base, ANCHOR, 0.5)
    np.testing.assert_array_equal(at_last, adopt(REBASE, LOCAL, BASE, ANCHOR, 0.5))


def test_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="no adopt rule 'merge'"):
        ADOPT_RULES.find("merge")
