"""The three adopt rules, by value."""

import numpy as np
import pytest

from diloco_jax.core.adopt import adopt

LOCAL, BASE = np.float32([5.0, 1.0]), np.float32([4.0, 1.0])
ANCHOR = np.float32([10.0, 20.0])


@pytest.mark.parametrize(
    ("rule", "alpha", "expected"),
    [
        ("rebase", 0.5, [11.0, 20.0]),
        ("overwrite", 0.5, [10.0, 20.0]),
        ("blend", 0.75, [6.25, 5.75]),
        ("blend", 0.0, [10.0, 20.0]),
        ("blend", 1.0, [5.0, 1.0]),
    ],
)
def test_rules(rule: str, alpha: float, expected: list[float]) -> None:
    result = adopt(rule, LOCAL, BASE, ANCHOR, alpha)
    np.testing.assert_array_equal(result, expected)


def test_unknown_rule_is_named() -> None:
    with pytest.raises(ValueError, match="no adopt rule 'merge'"):
        adopt("merge", LOCAL, BASE, ANCHOR, 0.5)
