"""Every record reaches the coordinator, whichever stream it goes on."""

import threading
from types import SimpleNamespace

from link_support import DEADLINES, WAIT_S, hello

from diloco_jax.island.network.link import Link
from diloco_jax.protocol import messages
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.values import Record


class Streams:
    """A coordinator for a link: keeps the records that come, by stream."""

    def __init__(self):
        self.records, self.second = [], threading.Event()

    def open_control(self, hello):
        number, records = len(self.records), []
        self.records.append(records)

        def send(message):
            records.extend(record.seq for record in message.records)
            if number and records:
                self.second.set()

        welcome = messages.Welcome(run_id="r", term=1, resumed=False, versions=())
        return SimpleNamespace(welcome=welcome, send=send)


class Reconnects:
    """The lock of those who send; the second who takes it finds another stream."""

    def __init__(self, reconnect):
        self.taken, self._reconnect = 0, reconnect

    def __enter__(self):
        self.taken += 1
        if self.taken == 2:
            self._reconnect()

    def __exit__(self, *error):
        pass


def test_what_went_on_a_lost_stream_is_said_again_on_the_next(mailbox):
    def record(number):
        said = Record(seq=number, kind="adopted", step=number)
        mailbox.post(Status(phase="training", steps=number), (said,))

    def reconnect():
        record(2)
        link._try_to_connect()

    streams = Streams()
    link = Link(streams, hello, mailbox, DEADLINES)
    link.connect(WAIT_S)
    link._sending = Reconnects(reconnect)
    record(1)
    reporting = threading.Thread(target=link._report, daemon=True)
    reporting.start()
    assert streams.second.wait(WAIT_S)
    link._closing.set()
    reporting.join(WAIT_S)
    assert streams.records == [[1], [1, 2]]
