"""A standby takes over from a primary that is killed, stopped or parted from it, while
two islands train; real processes throughout, each with a key of its own where the
primary is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import support
import tape_checks
from standby_support import (
    ASKING,
    BUDGET_S,
    TIMEOUT_S,
    WHO,
    Site,
    handed_out,
    keys_of,
    trained,
)

from diloco_jax.deadlines import Deadlines
from diloco_jax.errors import EXIT_CONFIG, EXIT_REFUSED
from diloco_jax.wire import follow
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.following import FollowStream
from diloco_jax.wire.principal import STANDBY
from diloco_jax.wire.tls import TlsFiles

pytestmark = [pytest.mark.dist, pytest.mark.timing]

MERGES = 8
SLACK_S = 6.0
"""Time in which the standby reads its disk, on a busy machine."""


class Taken(NamedTuple):
    """A run that a standby finished."""

    site: Site
    before: list[dict[str, Any]]
    """The first primary's tape, when it was struck."""
    tape: list[dict[str, Any]]
    struck_unix: float


def finished(site: Site, struck_unix: float, before: list[dict[str, Any]]) -> Taken:
    assert site.wait("two") == 0, site.log("two")
    assert [site.wait(island) for island in site.config.islands] == [0, 0]
    return Taken(site, before, site.tape("two"), struck_unix)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, Path]:
    """Folders of the keys that one command made, by the process that has them."""
    return keys_of(tmp_path_factory.mktemp("keys"))


def followed_with(site: Site, tls: TlsFiles) -> None:
    """Ask the primary to be followed, as a standby of the same run does."""
    request = follow.FollowRequest(
        node="stranger", fingerprint=site.config.run.fingerprint()
    )
    FollowStream(
        site.addresses["one"],
        request,
        tls=tls,
        insecure=False,
        deadlines=Deadlines(BUDGET_S),
    ).run(lambda message: pytest.fail(f"it was sent {message}"))


@pytest.fixture(scope="module")
def killed(text, tmp_path_factory, keys) -> Taken:
    """The primary dies by SIGKILL, its standby in step; no other key follows it. It is
    back as the other's standby."""
    with trained(text, tmp_path_factory.mktemp("killed"), MERGES, keys) as site:
        for name in ("a", ASKING):
            with pytest.raises(Refused, match=f"the standby.* of {WHO[name]}") as told:
                followed_with(site, TlsFiles.load(keys[name], WHO[name]))
            assert told.value.code == "identity"
        assert site.mandate().in_step, "the standby follows on"
        site.running["one"].kill()
        struck = time.time()
        site.wait("one")
        before = site.tape("one")
        site.await_status("two", lambda s: s["mandate"]["reign"] == 2)
        # Its own key says that it led before: with that it follows.
        site.start("one", "--standby-of", site.addresses["two"])
        site.await_status("two", lambda s: s["mandate"]["state"] == "in_step")
        taken = finished(site, struck, before)
        assert site.wait("one") == 0
        return taken


def test_a_standby_does_not_start_with_an_islands_key_under_its_own_name(
    text: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    folder = handed_out(keys["a"], WHO["a"], tmp_path / "wrong")
    for end in ("pem", "key"):
        own = folder / f"{WHO['a'].stem}.{end}"
        own.rename(folder / f"{STANDBY.stem}.{end}")
    site = Site(text, tmp_path, keys | {"two": folder})
    try:
        site.start("two", "--standby-of", site.addresses["one"])
        assert site.wait("two") == EXIT_CONFIG
        assert f"certificate of {WHO['a']}" in site.log("two")
    finally:
        site.close()


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory) -> Taken:
    """The primary is stopped for longer than its mandate, and goes on after that."""
    with trained(text, tmp_path_factory.mktemp("stopped"), MERGES) as site:
        site.running["one"].send_signal(signal.SIGSTOP)
        struck, before = time.time(), site.tape("one")
        site.await_status("two", lambda s: s["merges"] > MERGES + 3)
        site.running["one"].send_signal(signal.SIGCONT)
        assert site.wait("one") == EXIT_REFUSED, site.log("one")
        return finished(site, struck, before)


@pytest.fixture(params=["killed", "stopped"])
def taken(request: pytest.FixtureRequest) -> Taken:
    found: Taken = request.getfixturevalue(request.param)
    return found


def merged(tape: list[dict[str, Any]]) -> dict[tuple[int, ...], str]:
    """Digest by fragment and version."""
    return {
        (r["fragment"], *r["version"]): r["digest"]
        for r in tape
        if r["kind"] == "merged"
    }


def adopted(tape: list[dict[str, Any]]) -> list[tuple[str, int, list[int]]]:
    return [
        (r["island"], r["record"]["fragment"], r["record"]["version"])
        for r in tape
        if r["kind"] == "island" and r["record"]["kind"] == "adopted"
    ]


def test_the_standby_goes_on_within_a_budget_of_the_mandates_end(taken: Taken) -> None:
    (recovered,) = (r for r in taken.tape if r["kind"] == "recovered")
    after_s = recovered["time"] - taken.struck_unix
    assert after_s < 2 * BUDGET_S + SLACK_S
    assert "takes over, from log" in taken.site.log("two")


def test_what_was_visible_is_on_the_standbys_tape(taken: Taken) -> None:
    ours, theirs = merged(taken.before), merged(taken.tape)
    # The last ones may have been on their way, unseen.
    seen = {(f, *version) for _, f, version in adopted(taken.before)}
    assert len(seen) >= 3
    # What is begun with is no merge.
    assert seen & set(ours)
    for key in seen & set(ours):
        assert theirs[key] == ours[key]


def test_no_version_goes_back_and_the_books_are_exact(taken: Taken) -> None:
    summary, sizes = (
        taken.site.summary("two"),
        support.fragment_sizes(taken.site.config),
    )
    assert summary["phase"] == "done"
    assert summary["term"] == 1
    assert tape_checks.version_problems(taken.tape) == []
    assert tape_checks.ledger_problems(summary, taken.tape, sizes) == []
    assert tape_checks.interval_problems(taken.tape) == []
    newest: dict[tuple[str, int], list[int]] = {}
    for island, fragment, version in adopted(taken.tape):
        assert version >= newest.get((island, fragment), [0, 0])
        newest[island, fragment] = version


def test_no_island_started_again_and_none_lost_a_step(taken: Taken) -> None:
    islands = taken.site.summary("two")["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 1, "b": 1}
    assert all(i["tokens_lost"] == {} for i in islands.values())


def test_the_standbys_tape_repeats_the_whole_run(taken: Taken) -> None:
    command = [*support.DILOCO, "replay", str(taken.site.workdir("two")), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["identical"]
    assert outcome["merges"] == taken.site.summary("two")["merges"]


def test_a_primary_that_wakes_up_finds_out_and_shows_nothing(stopped: Taken) -> None:
    log = stopped.site.log("one")
    assert "holds the mandate in reign 2" in log
    assert not (stopped.site.workdir("one") / "summary.json").exists()
    unseen = set(merged(stopped.site.tape("one"))) - set(merged(stopped.before))
    theirs = merged(stopped.tape)
    for key in unseen:
        # It may have computed one; nobody adopted that.
        assert theirs.get(key) != merged(stopped.site.tape("one"))[key]


def test_a_partition_parts_the_two_and_not_the_run(text: Path, tmp_path: Path) -> None:
    """Then the parted standby has no right to its log, and gathers."""
    with trained(text, tmp_path, MERGES) as site:
        site.link.set(up=False, down=False)
        site.await_status("one", lambda s: s["mandate"]["state"] == "alone")
        told = "is not in step any more"
        # The alerts are those of half a second before.
        status = site.await_status(
            "one", lambda s: any(told in alert for alert in s["alerts"])
        )
        alone = status["merges"]
        site.await_status("one", lambda s: s["merges"] > alone + 2)
        site.link.set()
        site.await_status("one", lambda s: s["mandate"]["state"] == "in_step")
        site.link.set(up=False, down=False)
        site.await_status("one", lambda s: s["mandate"]["state"] == "alone")
        seen = site.await_status("one", lambda s: s["merges"] > alone + 4)["merges"]
        before = site.tape("one")
        site.running["one"].kill()
        assert site.wait("two") == 0, site.log("two")
        assert [site.wait(island) for island in site.config.islands] == [0, 0]
        assert "takes over, from gathering" in site.log("two")
        summary, tape = site.summary("two"), site.tape("two")
        assert summary["term"] == 2
        assert summary["merges"] >= seen
        assert tape[0]["kind"] == "term"
        newest: dict[int, list[int]] = {}
        for _, fragment, version in adopted(before):
            newest[fragment] = max(newest.get(fragment, version), version)
        for fragment, version in newest.items():
            assert tape[0]["replaced"][fragment] >= version
        sizes = support.fragment_sizes(site.config)
        assert tape_checks.version_problems(tape) == []
        assert tape_checks.ledger_problems(summary, tape, sizes) == []
