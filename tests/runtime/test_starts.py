"""What an island's start does not need."""

from __future__ import annotations

import logging

import pytest
from runtime_support import make_config, run_scripted

from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Busy

pytestmark = pytest.mark.dist


def test_a_path_that_cannot_be_tested_keeps_nobody_from_training(
    text, tmp_path, monkeypatch, caplog
):
    def busy(self):
        raise Busy("all places for path tests are taken")

    monkeypatch.setattr(Client, "probe", busy)
    with caplog.at_level(logging.INFO, "diloco_jax.island.main"):
        tape = run_scripted(make_config(text, cycles=1), tmp_path)
    assert "was not tested (all places for path tests are taken)" in caplog.text
    assert [record["kind"] for record in tape].count("merged") > 0
