"""A run is over when a snapshot has its last parameters, and not before."""

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


@pytest.mark.parametrize("service", [0.5], indirect=True)
def test_a_snapshot_that_does_not_end_leaves_the_run_to_be_gone_on_with(
    service, tmp_path, caplog
):
    ends = threading.Event()
    service._snapshots.write(time.monotonic(), lambda: ends.wait(PATIENCE_S) and None)
    assert service.conclude() == EXIT_FAILED
    assert "start the coordinator again, and it writes them" in caplog.text
    assert not (tmp_path / "run" / "summary.json").exists()
    ends.set()
    assert service.conclude() == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["parameters_digest"] == service.store.digest()


@pytest.mark.parametrize("service", [PATIENCE_S], indirect=True)
def test_one_that_is_slow_is_waited_for(service):
    ends = threading.Timer(0.2, (slow := threading.Event()).set)
    ends.start()
    service._snapshots.write(time.monotonic(), lambda: slow.wait(PATIENCE_S) and None)
    assert service.conclude() == EXIT_DONE
