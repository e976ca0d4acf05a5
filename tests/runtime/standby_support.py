"""A primary, its standby and two islands as real processes, with a link between the
two coordinators that can be cut."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import support
from coordinator_pair import Pair
from runtime_support import placed
from training_support import lasting

from diloco_jax.chaos.relay import Relay
from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import WireError
from diloco_jax.wire.principal import COORDINATOR, READER, STANDBY, Principal, island
from diloco_jax.wire.tls import TlsFiles

TRAINING_SECONDS = 30
BUDGET_S, TIMEOUT_S = 4.0, 150.0
ASKING = "asking"
"""Whose keys the test has when it asks for the status."""

ALL = "all"
"""The folder with the keys of everyone."""
WHO = {
    "one": COORDINATOR,
    "two": STANDBY,
    "a": island("a"),
    "b": island("b"),
    ASKING: READER,
}


def keys_of(folder: Path, *options: str) -> dict[str, Path]:
    """Folders of the keys that one command makes in `folder`, by the process that has
    them. options: more of the command."""
    command = [*support.DILOCO, "certs", str(folder / ALL), "--standby", *options]
    command += ["--hosts", "127.0.0.1", "--islands", "a", "b"]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    return {n: handed_out(folder / ALL, who, folder / n) for n, who in WHO.items()}


def handed_out(made: Path, who: Principal, folder: Path) -> Path:
    """A folder of this key alone."""
    folder.mkdir()
    for name in ("ca.pem", f"{who.stem}.pem", f"{who.stem}.key"):
        shutil.copy(made / name, folder)
    return folder


class Site(Pair):
    """The processes, by name: "one" leads at first, "two" is its standby."""

    def __init__(
        self,
        text: Path,
        folder: Path,
        keys: Mapping[str, Path] | None = None,
        **placement: Any,
    ) -> None:
        config = placed(
            lasting(text, TRAINING_SECONDS),
            time_budget_s=BUDGET_S,
            evaluate_every_steps=0,
            snapshot_every_s=2.0,
            **placement,
        )
        super().__init__(config, folder, keys)
        asking = (keys or {}).get(ASKING)
        self._tls = TlsFiles.load_any(asking) if asking else None
        self.link = Relay(self.addresses["one"])

    def wait(self, name: str) -> int:
        """The exit code of a process."""
        try:
            return self.running[name].wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log(name)) from None

    def await_status(
        self, name: str, holds: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """The status of a coordinator, once it is so."""
        deadline = time.monotonic() + TIMEOUT_S
        client = Client(
            self.addresses[name],
            tls=self._tls,
            deadlines=Deadlines(BUDGET_S),
            bulk_channels=1,
        )
        last: object = None
        with contextlib.closing(client):
            while time.monotonic() < deadline:
                with contextlib.suppress(WireError):
                    last = status = client.status(1.0)
                    if holds(status):
                        return status
                time.sleep(0.05)
        raise AssertionError(f"{last}\n{self.log(name)}")

    def close(self) -> None:
        super().close()
        self.link.close()


@contextlib.contextmanager
def trained(
    text: Path,
    folder: Path,
    merges: int,
    keys: Mapping[str, Path] | None = None,
    **placement: Any,
) -> Iterator[Site]:
    """A site whose islands have trained for so many merges, with a standby in step."""
    site = Site(text, folder, keys, **placement)
    try:
        site.start("one", "--init")
        site.start("two", "--standby-of", site.link.address)
        site.start_islands()
        site.await_status(
            "one",
            lambda s: s["merges"] >= merges and s["mandate"]["state"] == "in_step",
        )
        yield site
    finally:
        site.close()
