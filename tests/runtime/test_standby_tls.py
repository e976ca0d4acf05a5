"""A standby follows and takes over under TLS, each process with its own key alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import support
import tape_checks
from standby_support import (
    ASKING,
    BUDGET_S,
    WHO,
    Site,
    handed_out,
    keys_of,
    trained,
)

from diloco_jax.deadlines import Deadlines
from diloco_jax.exit_codes import EXIT_CONFIG
from diloco_jax.wire import follow
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.following import FollowStream
from diloco_jax.wire.principal import STANDBY
from diloco_jax.wire.tls import TlsFiles

pytestmark = [pytest.mark.dist, pytest.mark.timing]

MERGES = 4


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


def test_a_standby_takes_over_under_tls_and_no_other_key_follows(
    text: Path, tmp_path: Path, keys: dict[str, Path]
) -> None:
    with trained(text, tmp_path, MERGES, keys) as site:
        for name in ("a", ASKING):
            with pytest.raises(Refused, match=f"the standby.* of {WHO[name]}") as told:
                followed_with(site, TlsFiles.load(keys[name], WHO[name]))
            assert told.value.code == "identity"
        assert site.mandate().in_step, "the standby follows on"
        site.running["one"].kill()
        site.wait("one")
        site.await_status("two", lambda s: s["mandate"]["reign"] == 2)
        # Its own key says that it led before: with that it follows.
        site.start("one", "--standby-of", site.addresses["two"])
        site.await_status("two", lambda s: s["mandate"]["state"] == "in_step")
        assert [site.wait(name) for name in ("two", "one", "a", "b")] == [0] * 4
        summary, tape = site.summary("two"), site.tape("two")
    assert (summary["phase"], summary["term"]) == ("done", 1)
    assert all(i["joins"] == 1 for i in summary["islands"].values())
    sizes = support.fragment_sizes(site.config)
    assert tape_checks.version_problems(tape) == []
    assert tape_checks.ledger_problems(summary, tape, sizes) == []


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
