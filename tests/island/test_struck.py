"""A host lets nobody strike it whose own config does not say so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diloco_jax.config import Config, Placement
from diloco_jax.island import parts
from diloco_jax.island.parts import Parts
from diloco_jax.protocol.messages import StrikeRequest


@pytest.mark.parametrize("chaos", [True, False])
def test_its_own_config_decides_whatever_the_coordinator_orders(
    chaos: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    struck: list[tuple[str, float]] = []
    monkeypatch.setattr(parts, "strike_soon", lambda *how: struck.append(how))
    host = SimpleNamespace(config=Config(placement=Placement(chaos=chaos)))
    Parts.order(host, StrikeRequest(kind="stop", seconds=2.0))  # type: ignore[arg-type]
    assert struck == ([("stop", 2.0)] if chaos else [])
    assert ("placement.chaos is off here: no stop" in caplog.text) != chaos
