"""A run is over when a snapshot has its last parameters, and not before; whoever ends
one earlier waits for none."""

import contextlib
import json
import threading
import time

import pytest
from runtime_support import make_config, placed

from diloco_jax.coordinator.main import Coordinator
from diloco_jax.exit_codes import EXIT_DONE, EXIT_FAILED

PATIENCE_S = 60.0


@pytest.fixture
def service(text, tmp_path, request):
    """Its parameter: how long it waits for a snapshot."""
    config = placed(make_config(text), outage_budget_s=request.param)
    service = Coordinator(config, tmp_path / "run", init=True)
    with contextlib.closing(service):
        service.start()
        yield service


@pytest.fixture
def ends(service):
    """Lets the snapshot end that is being written."""
    event = threading.Event()
    service._snapshots.write(time.monotonic(), lambda: event.wait(PATIENCE_S) and None)
    yield event
    event.set()


@pytest.mark.parametrize("service", [0.5], indirect=True)
def test_a_snapshot_that_does_not_end_leaves_the_run_to_be_gone_on_with(
    service, ends, tmp_path, caplog
):
    service.engine.finished = True
    assert service.conclude() == EXIT_FAILED
    assert "start the coordinator again, and it writes it" in caplog.text
    assert not (tmp_path / "run" / "summary.json").exists()
    ends.set()
    assert service.conclude() == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["parameters_digest"] == service.store.digest()


@pytest.mark.parametrize("service", [PATIENCE_S], indirect=True)
def test_one_that_is_slow_is_waited_for(service, ends):
    service.engine.finished = True
    threading.Timer(0.2, ends.set).start()
    assert service.conclude() == EXIT_DONE


@pytest.mark.parametrize("service", [PATIENCE_S], indirect=True)
def test_the_summary_of_a_run_that_is_cut_off_comes_before_a_snapshot(
    service, ends, tmp_path
):
    ending = threading.Thread(target=service.conclude)
    ending.start()
    deadline = time.monotonic() + PATIENCE_S
    path = tmp_path / "run" / "summary.json"
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert json.loads(path.read_text())["phase"] == "stopped"
    assert ending.is_alive(), "the snapshot has not ended"
    ends.set()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
