"""A coordinator whose process is stopped, which answers nothing and closes nothing."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wire_support import WAIT_S, hello

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import ConnectionLost

pytestmark = pytest.mark.dist

BUDGET_S = 4.0
SERVE = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from wire_support import Recorder
from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.server import Server
server = Server(
    "127.0.0.1:0", Recorder(), tls=None, deadlines=Deadlines({BUDGET_S}),
    max_islands=3, max_hosts=3, bulk_channels=1,
)
print(server.start(), flush=True)
time.sleep({WAIT_S})
"""


def test_its_streams_end_within_a_budget_and_not_after_a_minute() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True
    )
    with process, contextlib.ExitStack() as opened:
        opened.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        client = Client(
            address, tls=None, deadlines=Deadlines(BUDGET_S), bulk_channels=1
        )
        opened.callback(client.close)
        stream = client.open_control(hello())
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(ConnectionLost):
            stream.receive(WAIT_S)
        assert time.monotonic() - stopped < 3 * BUDGET_S
