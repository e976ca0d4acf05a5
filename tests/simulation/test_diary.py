"""An emulated island's report of itself."""

import numpy as np

from diloco_jax.simulation.emulation.diary import Diary


def diary(seconds: list[float], skipped: list[float], steps: int) -> Diary:
    """Return the diary of steps without a pause between them."""
    ends = np.cumsum(seconds).tolist()
    return Diary(
        island="a",
        incarnation=1,
        tokens_per_step=1,
        began=0.0,
        compile_seconds=0.0,
        steps=steps,
        step_began=[0.0, *ends[:-1]],
        step_seconds=seconds,
        losses=[1.0] * len(seconds),
        skipped=skipped,
        predicted=[2.5] * len(seconds),
        learning_rates=[0.1] * len(seconds),
    )


def test_rounding_does_not_make_stalls_negative():
    chance = np.random.default_rng(0)
    for _ in range(20):
        seconds = chance.exponential(0.1, 50).tolist()
        assert 0 <= diary(seconds, [0.0] * 50, 50).measures().stalled_seconds < 1e-9


def test_skipped_steps_are_those_that_were_completed():
    assert diary([1.0] * 3, [1.0, 0.0, 1.0], 2).measures().skipped_steps == 1


def test_predictions_are_those_of_completed_steps():
    assert diary([1.0] * 3, [0.0] * 3, 2).measures().tokens_predicted == 5
