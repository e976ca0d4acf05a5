"""The results of a take, carried out on a replica's exchange."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from diloco_jax.island.device.replica import Replica
from diloco_jax.island.device.step import TrainState


@pytest.mark.parametrize(
    ("outcome", "call"),
    [
        ("settled", mock.call.settle(3)),
        ("reopened", mock.call.reopen(3)),
        ("dropped", mock.call.drop(3)),
    ],
)
def test_an_outcome_is_carried_out_and_leaves_the_parameters(outcome, call):
    exchange = mock.Mock()
    replica = Replica(SimpleNamespace(), exchange, TrainState("params", "moments"))
    replica.judge(3, outcome)
    assert exchange.mock_calls == [call]
    assert replica.params == "params"


def test_a_reset_replaces_the_parameters():
    exchange = mock.Mock()
    exchange.reset.return_value = "those of the anchor"
    replica = Replica(SimpleNamespace(), exchange, TrainState("params", "moments"))
    replica.judge(3, "reset")
    assert exchange.mock_calls == [mock.call.reset(3, "params")]
    assert replica.params == "those of the anchor"
