"""The watch over a run: what it makes anew, what it deletes, what it survives."""

import re
from pathlib import Path

import pytest
from webhook import webhook


def test_watch_deletes_all_but_the_run_once_it_is_done(cloud, launch, act):
    launch("gke")

    def done():
        cloud.set_object("job/two-coordinator", phase="done")

    assert act("gke", "watch", then=[lambda: None, done]) == 0
    left = ["persistentvolumeclaim/two-coordinator", "job/two-coordinator-begin"]
    assert list(cloud.objects) == left
    assert cloud.things == {}


def test_watch_sees_that_the_coordinator_has_ended(cloud, launch, act):
    launch("gke")
    assert act("gke", "watch", then=[cloud.complete]) == 0
    assert cloud.things == {}


def test_watch_makes_anew_what_was_taken_and_leaves_what_was_given_back(
    cloud, launch, act
):
    launch("tpu_vm")
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")
    # It ended with 2, say.
    cloud.lose("queued resource", "two-v6e-b")
    cloud.changes()
    seen = []

    def after_a_round():
        seen.extend(call for call in cloud.changes() if "ssh" not in call)
        # Both end, and the coordinator's machine deletes itself at last.
        cloud.lose("queued resource")
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[after_a_round]) == 0
    assert [call[4:6] for call in seen] == [
        ["delete", "two-v5p"],
        ["create", "two-v5p"],
    ]
    made = [call for call in cloud.changes() if "create" in call]
    assert made == []
    assert set(cloud.things) == {"disk", "secret"}


def test_what_watch_makes_anew_begins_above_all_before(cloud, launch, act, monkeypatch):
    launch("tpu_vm")
    before = first_incarnation(cloud)
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")
    later = before + 5000
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: later)

    def end():
        assert first_incarnation(cloud) == later
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[end]) == 0


def first_incarnation(cloud):
    made = cloud.things["queued resource"]["two-v5p"]
    script = Path(made["--metadata-from-file"].partition("=")[2]).read_text()
    return int(re.search(r"^FIRST_INCARNATION=(\d+)$", script, re.MULTILINE)[1])


def test_watch_ends_at_the_last_hour(cloud, launch, act, monkeypatch):
    launch("gke")
    now = [1_800_000_000.0]
    monkeypatch.setattr("diloco_jax.launch.command.time.time", lambda: now[0])

    def later():
        now[0] += 7200

    assert act("gke", "watch", then=[later], max_hours=1.5) == 0
    assert cloud.things == {}


STATUS = "compute ssh"
MACHINE = "compute instances describe"
SLICES = "compute tpus queued-resources"


@pytest.mark.parametrize(
    "command", [STATUS, MACHINE, f"{SLICES} describe", f"{SLICES} create"]
)
def test_no_call_that_fails_ends_the_watch(cloud, launch, act, capsys, command):
    launch("tpu_vm")
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")
    cloud.fail(command, 1, "no route to host")

    def put_right():
        cloud.fail("", 0, "")

    def look():
        assert cloud.things["queued resource"].keys() == {"two-v5p", "two-v6e-b"}
        made = cloud.things["queued resource"]["two-v5p"]
        assert made["state"] == "WAITING_FOR_RESOURCES"
        cloud.say_last("done")

    then = [lambda: None, put_right, look]
    assert act("tpu_vm", "watch", then=then) == 0
    if command != STATUS:
        assert "no route to host" in capsys.readouterr().err
    assert set(cloud.things) == {"disk", "secret"}


def test_a_slice_in_one_zone_is_made_anew_while_another_zone_fails(cloud, launch, act):
    launch("tpu_vm")
    for name in ("two-v5p", "two-v6e-b"):
        cloud.set_state("queued resource", name, "SUSPENDED")
    cloud.fail(f"{SLICES} describe two-v5p", 1, "the zone is away")

    def look():
        made = cloud.things["queued resource"]["two-v6e-b"]
        assert made["state"] == "WAITING_FOR_RESOURCES"
        cloud.fail("", 0, "")
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


def test_what_fails_round_after_round_is_told_aloud(cloud, launch, act, capsys):
    launch("tpu_vm")
    cloud.fail(MACHINE, 1, "no route to host")
    rounds = 25

    def put_right():
        cloud.fail("", 0, "")
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[*[lambda: None] * (rounds - 1), put_right]) == 0
    alarms = [line for line in capsys.readouterr().err.splitlines() if "ALARM" in line]
    told = [line for line in alarms if "THE COORDINATOR HAS" in line]
    assert ["10 ROUNDS" in told[0], "20 ROUNDS" in told[1]] == [True, True]
    assert len(told) == 2


def test_such_an_alarm_goes_where_the_runs_alerts_go(cloud, launch, act):
    launch("tpu_vm")
    cloud.fail(MACHINE, 1, "no route to host")
    rounds = 11

    def put_right():
        cloud.fail("", 0, "")
        cloud.say_last("done")

    with webhook() as hook:
        then = [*[lambda: None] * (rounds - 1), put_right]
        assert act("tpu_vm", "watch", then=then, alert_url=hook.url) == 0
    assert {message["run_id"] for message in hook.posted} == {"two"}
    sent = [alert for message in hook.posted for alert in message["alerts"]]
    (told,) = [alert for alert in sent if "THE COORDINATOR HAS" in alert]
    assert told.startswith("ALARM: THE COORDINATOR HAS FAILED FOR 10 ROUNDS of")
    assert "no route to host" in told
    assert "\n" not in told


def test_a_slice_that_could_not_be_made_at_once_is_made_later(cloud, launch, act):
    launch("tpu_vm")
    cloud.set_state("queued resource", "two-v5p", "SUSPENDED")
    cloud.fail(f"{SLICES} create", 1, "quota exceeded")

    class GoneError(Exception):
        """As if the watch's own machine had died."""

    def die():
        assert "two-v5p" not in cloud.things["queued resource"]
        raise GoneError

    with pytest.raises(GoneError):
        act("tpu_vm", "watch", then=[die])
    cloud.fail("", 0, "")

    def look():
        assert "two-v5p" in cloud.things["queued resource"]
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


def test_a_watch_makes_what_create_could_not(cloud, launch, act):
    cloud.fail(f"{SLICES} create", 1, "quota exceeded")
    assert launch("tpu_vm") == 1
    cloud.fail("", 0, "")

    def look():
        assert cloud.things["queued resource"].keys() == {"two-v5p", "two-v6e-b"}
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


def test_what_a_person_deletes_is_not_made_anew(cloud, launch, act):
    cloud.fail(f"{SLICES} create", 1, "quota exceeded")
    assert launch("tpu_vm") == 1
    cloud.fail("", 0, "")
    launch("tpu_vm", "delete", only=("v6e.b",))

    def look():
        assert cloud.things["queued resource"].keys() == {"two-v5p"}
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look]) == 0


@pytest.mark.parametrize("word", ["", "failed", "goes-on"])
def test_a_coordinator_that_is_merely_gone_ends_nothing(
    cloud, launch, act, capsys, word
):
    launch("tpu_vm")

    def look():
        assert len(cloud.things["queued resource"]) == 2
        told = capsys.readouterr().err
        assert f"is not there, and its last word is '{word or 'none'}'" in told
        cloud.say_last("hours")

    def go():
        cloud.say_last(word) if word else cloud.lose("instance")

    assert act("tpu_vm", "watch", then=[go, look]) == 0
    assert set(cloud.things) == {"disk", "secret"}


def test_the_word_of_a_coordinator_before_does_not_end_a_run_that_goes_on(
    cloud, launch, act
):
    launch("tpu_vm")
    cloud.say_last("done")
    # The run is extended, and its machine cannot be made at once.
    cloud.fail("compute instances create", 1, "STOCKOUT")
    assert launch("tpu_vm") == 1

    def look():
        assert "instance" not in cloud.things
        assert len(cloud.things["queued resource"]) == 2
        cloud.fail("", 0, "")

    def end():
        assert "two-coordinator" in cloud.things["instance"]
        cloud.say_last("done")

    assert act("tpu_vm", "watch", then=[look, end]) == 0


def test_what_cannot_be_deleted_at_the_end_holds_up_nothing_else(
    cloud, launch, act, capsys
):
    launch("tpu_vm")
    cloud.fail("compute firewall-rules delete", 1, "no route to host")
    seen = []

    def put_right():
        seen.append(set(cloud.things))
        cloud.fail("", 0, "")

    assert act("tpu_vm", "watch", then=[lambda: cloud.say_last("done"), put_right]) == 0
    assert seen == [{"disk", "firewall rule", "secret"}]
    assert set(cloud.things) == {"disk", "secret"}
    assert "# kept: disk two-coordinator" in capsys.readouterr().err
