"""Machines that are lost while the cloud says that what they belong to is there."""

import json

import pytest

from diloco_jax.launch.submit import UNWELL_ROUNDS

SLICE = ["gcloud", "compute", "tpus", "queued-resources"]
MACHINE = ["gcloud", "compute", "instances"]
STATUS = "compute ssh"


def made_anew(cloud, words):
    """The deletions and creations among the calls since the last look, by name."""
    calls = [call for call in cloud.changes() if call[: len(words)] == words]
    return [(call[len(words)], call[len(words) + 1]) for call in calls]


def answer(cloud, silent_seconds, phase="running"):
    """Lets the coordinator say when it heard last of the island v5p."""
    islands = {"v5p": {"silent_seconds": silent_seconds}}
    cloud.answer(STATUS, json.dumps({"phase": phase, "islands": islands}))


@pytest.mark.parametrize("state", ["TERMINATED", "SUSPENDED"])
def test_a_coordinator_that_was_stopped_is_made_anew_on_its_disk(
    cloud, launch, act, capsys, state
):
    launch("tpu_vm")
    disk = cloud.things["disk"]["two-coordinator"]
    cloud.set_state("instance", "two-coordinator", state)
    cloud.changes()

    def look():
        assert made_anew(cloud, MACHINE) == [
            ("delete", "two-coordinator"),
            ("create", "two-coordinator"),
        ]
        assert cloud.things["instance"]["two-coordinator"]["state"] == "RUNNING"
        assert cloud.things["disk"]["two-coordinator"] == disk
        assert len(cloud.things["queued resource"]) == 2
        assert "nobody leads it" not in capsys.readouterr().err
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


def test_a_coordinator_that_goes_on_is_left_alone(cloud, launch, act):
    launch("tpu_vm")
    cloud.changes()

    def look():
        assert made_anew(cloud, MACHINE) == []
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


def test_a_stopped_coordinator_whose_run_is_over_is_not_made_anew(cloud, launch, act):
    launch("tpu_vm")
    machine = cloud.things["instance"]["two-coordinator"]
    cloud.say_last("done")
    things = cloud.things
    things["instance"] = {"two-coordinator": machine | {"state": "TERMINATED"}}
    (cloud._folder / "things.json").write_text(json.dumps(things))
    cloud.changes()
    assert act("tpu_vm", "watch") == 0
    assert made_anew(cloud, MACHINE) == [("delete", "two-coordinator")]
    assert set(cloud.things) == {"disk", "secret"}


def test_create_makes_a_stopped_coordinator_anew(cloud, launch):
    launch("tpu_vm")
    cloud.set_state("instance", "two-coordinator", "TERMINATED")
    assert launch("tpu_vm") == 0
    assert cloud.things["instance"]["two-coordinator"]["state"] == "RUNNING"


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED", "PREEMPTED\tHEALTHY"])
def test_a_slice_that_was_preempted_under_an_active_request_is_made_anew(
    cloud, launch, act, state
):
    launch("tpu_vm")
    cloud.set_slice("two-v5p", state)
    cloud.set_slice("two-v6e-b", "READY\tHEALTHY")
    cloud.changes()

    def look():
        assert made_anew(cloud, SLICE) == [("delete", "two-v5p"), ("create", "two-v5p")]
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


UNWELL = ["READY\tUNHEALTHY_MAINTENANCE", "READY\tTIMEOUT", "REPAIRING", "STOPPED", ""]


@pytest.mark.parametrize("state", UNWELL)
def test_a_slice_that_stays_unwell_and_whose_island_is_silent_is_made_anew(
    cloud, launch, act, capsys, state
):
    launch("tpu_vm")
    cloud.set_slice("two-v5p", state)
    answer(cloud, 1000.0)
    cloud.changes()

    def not_yet():
        assert made_anew(cloud, SLICE) == []

    def look():
        assert made_anew(cloud, SLICE) == [("delete", "two-v5p"), ("create", "two-v5p")]
        said = capsys.readouterr().err
        assert f"ACTIVE {' '.join(state.split()) or 'MISSING'}, and no sign" in said
        cloud.say_last("done")

    then = [*[not_yet] * (UNWELL_ROUNDS - 1), look]
    assert act("tpu_vm", "watch", then=then) == 0


def heard(cloud, n):
    answer(cloud, 3.0)


def unheard_of(cloud, n):
    cloud.fail(STATUS, 1, "no route to host")


def well_again(cloud, n):
    answer(cloud, 1000.0)
    cloud.set_slice("two-v5p", "READY\tHEALTHY" if n % 10 == 9 else "READY\tTIMEOUT")


@pytest.mark.parametrize("happens", [heard, unheard_of, well_again])
def test_a_slice_that_may_work_is_left_alone(cloud, launch, act, happens):
    """The cloud's health may be wrong for days while an island trains."""
    launch("tpu_vm")
    cloud.set_slice("two-v5p", "READY\tUNHEALTHY_TENSORFLOW")
    rounds = 3 * UNWELL_ROUNDS
    happens(cloud, 0)
    cloud.changes()
    number = iter(range(1, rounds))

    def go_on():
        assert made_anew(cloud, SLICE) == []
        happens(cloud, next(number))

    def end():
        assert made_anew(cloud, SLICE) == []
        cloud.fail("", 0, "")
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[*[go_on] * (rounds - 1), end]) == 0
