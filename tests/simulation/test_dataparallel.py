"""One data-parallel program, with and without elasticity, against known cases."""

import numpy as np
import pytest

from diloco_jax.observability.measures import goodput, uptime
from diloco_jax.simulation.fleets.dataparallel import elastic, rigid
from diloco_jax.simulation.fleets.failures import FailureModel

DAY_S = 86_400.0
NEVER = FailureModel(mtbi_years=0)


@pytest.mark.parametrize("method", [elastic, rigid])
def test_without_interruptions_nothing_is_lost(method):
    island = method(1e6, 10.0, NEVER, DAY_S, np.random.default_rng(0))
    assert goodput([island]) == pytest.approx(1.0)
    assert uptime([island], DAY_S) == pytest.approx(1.0)


@pytest.mark.parametrize("method", [elastic, rigid])
def test_waiting_for_each_other_costs_its_share(method):
    rng = np.random.default_rng(0)
    island = method(1e6, 10.0, NEVER, DAY_S, rng, computing=0.8)
    assert goodput([island]) == pytest.approx(0.8, abs=1e-3)


def test_rigid_loses_one_restart_for_every_step_with_an_interruption():
    model = FailureModel()
    rng = np.random.default_rng(0)
    island = rigid(1.2e6, 10.0, model, 10 * DAY_S, rng)
    interrupted = 1 - np.exp(-1.2e6 * model.interruptions_per_chip_second * 10)
    expected = 10 / (10 + interrupted * model.restart_seconds)
    assert goodput([island]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("model", [NEVER, FailureModel()])
def test_a_step_that_the_end_cuts_off_is_no_goodput_of_rigid(model):
    for seed in range(20):
        island = rigid(1.2e6, 10.0, model, 995.0, np.random.default_rng(seed))
        assert goodput([island]) <= uptime([island], 995.0)


def test_the_calibrated_model_gives_the_figures_of_the_reference_sheet():
    def measured(method, chips: float) -> float:
        islands = [
            method(chips, 10.0, FailureModel(), DAY_S, np.random.default_rng(seed))
            for seed in range(3)
        ]
        return goodput(islands)

    assert measured(elastic, 1.2e6) == pytest.approx(0.559, abs=0.01)
    assert measured(elastic, 1.2e6 / 8) == pytest.approx(0.888, abs=0.01)
    assert measured(rigid, 1.2e6) == pytest.approx(0.271, abs=0.01)
