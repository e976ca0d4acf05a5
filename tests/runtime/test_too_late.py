"""After the end of a run its coordinator tells whoever comes that it is over."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runtime_support import PATIENCE_S, client, hello, make_config, placed

from diloco_jax.cluster.status import read_status
from diloco_jax.coordinator import main
from diloco_jax.errors import EXIT_DONE
from diloco_jax.island.link import ending_of
from diloco_jax.observability.measures import health_of
from diloco_jax.protocol import messages
from diloco_jax.wire.errors import ConnectionLost, Refused
from diloco_jax.workdir import read_summary


def done(service: main.Coordinator) -> None:
    """As if every token were merged."""
    engine = service.lead.engine
    engine.state = msgspec.structs.replace(engine.state, phase="done")


def said_to(address: str, greeting: messages.Hello) -> Refused:
    """Return the refusal. As an island does, say hello again where the stream was of
    the coordinator before its end, which closes it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        with client(address) as island:
            try:
                island.open_control(greeting)
            except Refused as refused:
                return refused
            except ConnectionLost:
                assert time.monotonic() < until
            else:
                pytest.fail("let in after the end")


@pytest.mark.timeout(2 * PATIENCE_S)
def test_islands_that_come_after_the_end_are_told(text: Path, tmp_path: Path) -> None:
    config = placed(make_config(text), linger_s=10 * PATIENCE_S)
    service = main.Coordinator(config, tmp_path, init=True)
    service.start()
    codes: list[int] = []
    try:
        done(service)
        ending = threading.Thread(target=lambda: codes.append(service.conclude()))
        ending.start()
        late = said_to(service.address, hello(config))
        assert late.code == "finished"
        assert ending_of(late).exit_code == EXIT_DONE
        assert said_to(service.address, hello(config, "b", incarnation=7)).code == (
            "finished"
        )
        # Whoever has got the wrong address is not told that all is well.
        foreign = hello(config, fingerprint="of another run")
        assert said_to(service.address, foreign).code == "config"
        with client(service.address) as island:
            assert "islands" in island.status(PATIENCE_S)
            with pytest.raises(Refused, match="the run is over"):
                island.keep(0, PATIENCE_S)
        assert ending.is_alive()
        service._asked_to_end(15, None)
        ending.join(PATIENCE_S)
        assert codes == [EXIT_DONE]
        assert read_summary(tmp_path)["phase"] == "done"
    finally:
        service._interrupted = True  # To be asked twice ends this process.
        service.close()


@pytest.mark.timeout(2 * PATIENCE_S)
def test_without_lingering_it_answers_until_the_summary_is_there(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = main.Coordinator(make_config(text), tmp_path, init=True)
    service.start()
    shown: list[dict[str, Any]] = []
    save = service._save

    def watched(write: Any) -> bool:
        shown.append(read_status(str(tmp_path), service.config.placement))
        return save(write)

    monkeypatch.setattr(service, "_save", watched)
    try:
        done(service)
        assert service.conclude() == EXIT_DONE
        assert [status["phase"] for status in shown] == ["ending"]
        assert health_of(shown[0]) == {"state": "ending", "why": []}
        with client(service.address) as island, pytest.raises(ConnectionLost):
            island.status(PATIENCE_S)
    finally:
        service.close()
