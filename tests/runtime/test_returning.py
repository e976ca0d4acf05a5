"""An island that comes back on an empty disk fetches while it reads its programs from
the cache that its owner's islands share."""

from __future__ import annotations

import threading

from runtime_support import (
    PATIENCE_S,
    coordinator,
    make_config,
    placed,
)

from diloco_jax import compilation
from diloco_jax.island.main import TrainingHost
from diloco_jax.protocol.island.boundary import Ending


class Waits(TrainingHost):
    """Compiles once all fragments have come."""

    came, told = threading.Event(), list[dict[str, int]]()

    def _tell_left(self, **left: int) -> None:
        super()._tell_left(**left)
        self.told.append(left)
        if left.get("fragments_left") == 0:
            self.came.set()

    def compile(self) -> None:
        assert self.came.wait(PATIENCE_S), "it fetches after it has compiled"
        assert self.told == [{"fragments_left": left} for left in (2, 1, 0)]
        super().compile()
        programs = [left["programs_left"] for left in self.told[3:]]
        assert programs == list(range(len(programs), 0, -1))


def test_anchors_come_beside_compilation(text, tmp_path, monkeypatch):
    config, caches = placed(make_config(text), time_budget_s=PATIENCE_S), list[str]()
    monkeypatch.setattr(
        compilation, "use_cache", lambda folder, *kind: caches.append(folder)
    )
    with coordinator(config, tmp_path / "run") as service:
        island = Waits(config, "a", service.address, tmp_path / "a", cache="shared")
        island.start()
        assert caches[-1] == "shared"
        assert island.exchange.anchor(0)
        assert not any(island.mailbox.tell_left().values())
        island.stop(Ending(0, "end of test", "stopped"))
        island.close()
