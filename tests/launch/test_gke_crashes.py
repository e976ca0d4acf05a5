"""Which ends of a pod count, and what a pod that crashed says."""

import dataclasses
import os
import signal

import pytest
from gke_support import container_script, job_and_pod, rendered
from test_gke import UNTIL_TERM, WAIT_S

from diloco_jax import run_files
from diloco_jax.launch.order import FRUITLESS_STARTS
from diloco_jax.launch.pod_scripts import LASTED_CODE

PARTS = ("island", "coordinator", "worker")


def script_of(config, part, seconds=600):
    """A part's script, with so many seconds in the place of ten minutes."""
    placement = dataclasses.replace(config.placement, workers=2)
    config = dataclasses.replace(config, placement=placement)
    made = rendered(config, workers_apart=True)
    if part == "island":
        return container_script(job_and_pod(made["JobSet", "two-v5p"])[2])
    job = made["Job", "two-coordinator" if part == "coordinator" else "two-worker-1"]
    script = container_script(job["spec"]["template"]["spec"])
    assert '"$SECONDS" -ge 600' in script
    return script.replace('"$SECONDS" -ge 600', f'"$SECONDS" -ge {seconds}')


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("part", PARTS)
def test_a_crash_before_lasting_progress_counts_and_says_so(
    config, shell, run, capfd, part
):
    for code in (1, 137):
        process = shell(script_of(config, part), f"exit {code}")
        process.communicate(timeout=WAIT_S)
        assert process.returncode == code
        said = capfd.readouterr().err
        assert f"ended with exit code {code} before 600 s of progress" in said
        assert f"after {FRUITLESS_STARTS} such starts" in said
    for code in (0, 2, 3):
        process = shell(script_of(config, part), f"exit {code}")
        process.communicate(timeout=WAIT_S)
        assert process.returncode == code
        assert not capfd.readouterr().err


@pytest.mark.parametrize("part", PARTS)
def test_a_crash_after_lasting_progress_does_not_count(config, shell, run, capfd, part):
    script, publishes = script_of(config, part, 0), run / run_files.PUBLISHES
    made = {
        "island": f"touch {run / run_files.LASTED}\n",
        "coordinator": f"mkdir -p {publishes}; touch {publishes}\n",
        "worker": "",
    }[part]
    for code, ends in ((1, LASTED_CODE), (124, LASTED_CODE), (0, 0), (2, 2), (3, 3)):
        process = shell(script, f"{made}exit {code}")
        process.communicate(timeout=WAIT_S)
        assert process.returncode == ends
    assert not capfd.readouterr().err


@pytest.mark.parametrize("seconds", [0, 600])
def test_a_coordinator_lasts_by_what_it_merged_in_this_start(
    config, shell, run, seconds
):
    before = run / run_files.PUBLISHES / "8"
    before.mkdir(parents=True)
    for path in (before, before.parent):
        os.utime(path, (1e9, 1e9))
    script = script_of(config, "coordinator", seconds)
    for body, lasted in (("", False), (f"touch {before}\n", seconds == 0)):
        process = shell(script, f"{body}exit 1")
        process.communicate(timeout=WAIT_S)
        assert process.returncode == (LASTED_CODE if lasted else 1)


@pytest.mark.parametrize("part", PARTS)
def test_an_end_that_was_asked_for_is_no_crash_to_tell(config, shell, run, capfd, part):
    process = shell(script_of(config, part), UNTIL_TERM % ("goodbye", 1))
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=WAIT_S)[0] == "goodbye\n"
    assert process.returncode == 1
    assert "ended with" not in capfd.readouterr().err
