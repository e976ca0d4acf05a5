"""`diloco admit` and `diloco release`, and a coordinator that is killed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from runtime_support import (
    PATIENCE_S,
    client,
    coordinator,
    hello,
    make_config,
    placed,
)

from diloco_jax import cli
from diloco_jax.config import Config
from diloco_jax.protocol import messages
from diloco_jax.wire import peers
from diloco_jax.wire.bulk import FetchRequest
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import Refused
from diloco_jax.wire.tls import TlsFiles


def comes(
    address: str, folder: Path, config: Config, incarnation: int, name: str = "c"
) -> str:
    """Say hello as an island; return the code of the refusal, or "welcome"."""
    tls = TlsFiles.load(folder / "certificates", peers.island(name))
    who = {
        "island": name,
        "incarnation": incarnation,
        "session": f"{name}{incarnation}",
    }
    with client(address, tls=tls) as island:
        try:
            stranger = msgspec.structs.replace(hello(config), **who)
            stream = island.open_control(stranger)
        except Refused as refused:
            return refused.code
        assert isinstance(stream.welcome, messages.Welcome)
        return "welcome"


def fetches(address: str, folder: Path, run_id: str) -> str:
    """Fetch as the first incarnation of c; return the code of the refusal, or "all"."""
    tls = TlsFiles.load(folder / "certificates", peers.island("c"))
    who = {"island": "c", "incarnation": 1, "session": "c1"}
    what = {"fragment": 0, "want": messages.FIRST_VERSION, "have": None}
    with client(address, tls=tls) as island:
        try:
            request = FetchRequest(run_id=run_id, **who, **what)
            island.transfers.fetch(request, max_bytes=1 << 30)
        except Refused as refused:
            return refused.code
        return "all"


def test_an_operator_admits_and_removes_an_island_of_a_run_that_goes_on(
    text, tmp_path, capsys
):
    """After a SIGKILL d, which was admitted, is in; c, which was removed, stays out."""
    certificates = tmp_path / "certificates"
    make_certificates(certificates, [], 1, islands=["a", "b", "c", "d"])
    config = placed(
        make_config(text), certificates=str(certificates), time_budget_s=PATIENCE_S
    )
    run = tmp_path / "run"

    def call(command: str, name: str = "c", *options: str) -> int:
        return cli.main([command, name, "--coordinator", str(run), *options])

    with coordinator(config, run, killed=True) as service:
        address = service.address
        assert comes(address, tmp_path, config, 1) == "unknown_island"
        assert call("admit", "c", "--certificates", str(tmp_path / "none")) == 2
        assert call("admit") == 0
        assert "besides those of the config: c" in capsys.readouterr().err
        assert comes(address, tmp_path, config, 1) == "welcome"
        run_id = service.lead.config.run_id
        assert fetches(address, tmp_path, run_id) == "all"
        assert call("release") == 0
        assert call("release", "x") == 3
        assert call("admit", "d") == 0
        assert call("admit", "c", "--remove") == 0
        assert fetches(address, tmp_path, run_id) == "removed"
        assert comes(address, tmp_path, config, 2) == "unknown_island"
    with coordinator(config, run, init=False, killed=True) as service:
        address = service.address
        assert comes(address, tmp_path, config, 3) == "unknown_island"
        assert comes(address, tmp_path, config, 1, "d") == "welcome"
    with pytest.raises(SystemExit):
        call("admit", "c", "--nonsense")
    assert call("admit") == 1, "no coordinator is up"
