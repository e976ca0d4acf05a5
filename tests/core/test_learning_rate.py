"""The learning rate by the progress of the run."""

import dataclasses

import pytest

from diloco_jax.core.learning_rate import learning_rate


@dataclasses.dataclass(frozen=True)
class Settings:
    learning_rate: float = 2.0
    schedule: str = "cosine"
    warmup_fraction: float = 0.1
    final_fraction: float = 0.25


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(-1, 0), (0, 0), (0.05, 1), (0.1, 2), (0.55, 1.25), (1, 0.5), (2, 0.5)],
)
def test_rate_by_progress(progress: float, expected: float) -> None:
    assert learning_rate(Settings(), progress) == pytest.approx(expected)
    half = learning_rate(Settings(), progress, rewarm=0.5)
    assert half == pytest.approx(expected / 2)


def test_constant_rate_stays() -> None:
    flat = Settings(schedule="constant")
    assert learning_rate(flat, 0.05) == 1.0
    assert learning_rate(flat, 1.0) == 2.0
    no_warm_up = dataclasses.replace(flat, warmup_fraction=0.0)
    assert learning_rate(no_warm_up, 0.0) == 2.0


def test_an_unknown_course_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inner\.schedule = 'linear'"):
        learning_rate(Settings(schedule="linear"), 0.5)
