"""A run is over when a snapshot has its last parameters, and not before; whoever ends
one earlier waits for none."""

import contextlib
import dataclasses
import json
import os
import threading
import time

import pytest
from msgspec.structs import replace
from runtime_support import PATIENCE_S, await_that, coordinator, make_config, placed

from diloco_jax import run_files
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.errors import EXIT_DONE, EXIT_FAILED
from diloco_jax.files import write_json
from diloco_jax.workdir import read_facts


@pytest.fixture
def service(text, tmp_path, request):
    """Its parameter: how long it waits for a snapshot."""
    config = placed(
        make_config(text), outage_budget_s=request.param, time_budget_s=PATIENCE_S
    )
    service = Coordinator(config, tmp_path / "run", init=True)
    with contextlib.closing(service):
        service.start()
        yield service


@pytest.fixture
def ends(service):
    """Lets the snapshot end that is being written."""
    event = threading.Event()
    writer = service.holder._snapshots.writer
    writer.write(time.monotonic(), lambda: event.wait(PATIENCE_S) and None)
    yield event
    event.set()


def end(service):
    """As if the run were over: it has its tokens."""
    engine = service.lead.engine
    tokens = service.lead.config.total_tokens
    engine.state = replace(engine.state, phase="done", progress_tokens=tokens)


@pytest.fixture
def ended(text, tmp_path):
    """A run that was over a thousand seconds ago."""
    config, workdir = make_config(text), tmp_path / "run"
    with coordinator(config, workdir) as service:
        end(service)
    facts = read_facts(workdir)
    begun = facts.begun_unix - 1000
    dataclasses.replace(facts, begun_unix=begun).write(workdir)
    roster = workdir / run_files.ROSTER
    then = roster.stat().st_mtime - 1000
    os.utime(roster, (then, then))
    return config, workdir


@pytest.mark.parametrize("service", [0.5], indirect=True)
def test_a_snapshot_that_does_not_end_leaves_the_run_to_be_gone_on_with(
    service, ends, tmp_path, caplog
):
    end(service)
    assert service.conclude() == EXIT_FAILED
    assert "start the coordinator again, and it writes it" in caplog.text
    assert not (tmp_path / "run" / "summary.json").exists()
    ends.set()
    service.holder._snapshots.writer._thread.join(PATIENCE_S)
    assert service.conclude() == EXIT_DONE
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["parameters_digest"] == service.holder.store.digest()


@pytest.mark.parametrize("service", [PATIENCE_S], indirect=True)
def test_one_that_is_slow_is_waited_for(service, ends):
    end(service)
    threading.Timer(0.2, ends.set).start()
    assert service.conclude() == EXIT_DONE


@pytest.mark.parametrize("service", [PATIENCE_S], indirect=True)
def test_the_summary_of_a_run_that_is_cut_off_comes_before_a_snapshot(
    service, ends, tmp_path
):
    ending = threading.Thread(target=service.conclude)
    ending.start()
    path = tmp_path / "run" / "summary.json"
    await_that(path.exists)
    assert json.loads(path.read_text())["phase"] == "stopped"
    assert ending.is_alive(), "the snapshot has not ended"
    ends.set()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()


def test_a_coordinator_of_a_run_that_is_over_leaves_its_summary_alone(ended):
    """As where a pod is scheduled anew, or a machine boots, after the end."""
    config, workdir = ended
    path = workdir / "summary.json"
    write_json({**json.loads(path.read_bytes()), "eval_loss": 1.5}, path)
    before = path.read_bytes()
    with coordinator(config, workdir, init=False):
        pass
    assert path.read_bytes() == before


def test_a_summary_that_is_written_later_counts_up_to_the_end(ended):
    config, workdir = ended
    path = workdir / "summary.json"
    before = json.loads(path.read_bytes())
    path.unlink()
    with coordinator(config, workdir, init=False):
        pass
    after = json.loads(path.read_bytes())
    assert after["wall_seconds"] == pytest.approx(before["wall_seconds"], abs=100)
    assert after["parameters_digest"] == before["parameters_digest"]
