"""Alerts reach people: few messages, each once, and nothing waits for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from webhook import Hook, webhook

from diloco_jax.config import Placement
from diloco_jax.observability import alarm as module
from diloco_jax.observability.alarm import EVERY_S, FORGOTTEN_S, TOGETHER, Alarm


class Wire:
    """An alarm whose alerts and clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alerts = 0.0, list[str]()
        self.sent: list[tuple[list[str], int]] = []
        placement = Placement(alert_command="true")
        self.alarm = Alarm(placement, "r", lambda: self.alerts, lambda: self.now)
        monkeypatch.setattr(
            self.alarm, "_deliver", lambda some, more: self.sent.append((some, more))
        )

    def look(self, seconds: float = 1.0) -> list[tuple[list[str], int]]:
        """A second later, or more; what was sent."""
        self.now += seconds
        before = len(self.sent)
        self.alarm.look()
        return self.sent[before:]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def test_an_alert_is_sent_once_however_long_it_stands(wire):
    wire.alerts = ["disk: 12 MB are free"]
    assert wire.look() == [(["disk: 12 MB are free"], 0)]
    wire.alerts = ["disk: 11.5 MB are free"]
    for _ in range(1000):
        assert wire.look() == [], "another number is no other alert"


def test_an_alert_that_comes_back_after_a_while_is_new(wire):
    wire.alerts = ["a"]
    assert wire.look()
    wire.alerts = []
    wire.look(FORGOTTEN_S - 10)
    wire.alerts = ["a"]
    assert wire.look() == []
    wire.alerts = []
    wire.look(FORGOTTEN_S)
    wire.alerts = ["a"]
    assert wire.look()


def test_an_alert_that_is_raised_again_while_it_stands_is_sent_again(wire):
    """An island vanishes a second time: the first alert may stand for days."""
    wire.alerts = ["island 'b' is absent; 3 of 4 are left"]
    wire.alarm.raised(wire.alerts[0])
    assert len(wire.look()) == 1
    assert [wire.look(60.0) for _ in range(100)] == [[]] * 100
    wire.alarm.raised("island 'b' is absent; 2 of 4 are left")
    assert wire.look() == [(["island 'b' is absent; 2 of 4 are left"], 0)]
    wire.alarm.raised("island 'b' is absent; 1 of 4 are left")
    assert wire.look(FORGOTTEN_S / 2) == [], "too soon"
    sent = [message for _ in range(10) for message in wire.look(FORGOTTEN_S / 4)]
    assert sent == [(["island 'b' is absent; 1 of 4 are left"], 0)]


def test_a_storm_is_a_message_a_minute_with_what_fits(wire):
    sent = []
    for second in range(300):
        wire.alerts = [f"island {chr(97 + second % 26)}{chr(97 + second // 26)}"]
        sent += wire.look()
    assert len(sent) == 300 // EVERY_S
    assert all(len(some) <= TOGETHER for some, _ in sent)
    assert sum(len(some) + more for some, more in sent) >= 300 - EVERY_S
    assert len(wire.alarm._known) == 300


def test_what_it_remembers_is_bounded(wire, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 5)
    for number in range(26):
        wire.alerts = [f"alert {chr(97 + number)}"]
        for _ in range(2):
            wire.alarm.raised(wire.alerts[0])
            wire.look()
    assert len(wire.alarm._known) == 5
    assert len(wire.alarm._waiting) <= TOGETHER


# ---- real ways to people -----------------------------------------------------------


@pytest.fixture
def hook() -> Iterator[Hook]:
    with webhook() as served:
        yield served


def test_a_command_and_a_url_get_the_alerts(tmp_path, hook):
    url, posted = hook
    out = tmp_path / "out"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    placement = Placement(alert_command=f'{sys.executable} -c "{code}"', alert_url=url)
    alarm = Alarm(placement, "run-1", lambda: ["a hangs", "b hangs"])
    alarm.start()
    alarm.close(60.0)
    assert out.read_text() == "run run-1\na hangs\nb hangs\n"
    assert posted == [
        {
            "text": "a hangs\nb hangs",
            "run_id": "run-1",
            "alerts": ["a hangs", "b hangs"],
            "more": 0,
        }
    ]


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (Placement(alert_command="/nonexistent/mail"), "No such file"),
        (Placement(alert_command="false"), "non-zero exit status 1"),
        (Placement(alert_url="http://127.0.0.1:1/hook"), "refused"),
    ],
)
def test_what_cannot_be_delivered_is_logged_and_stops_nothing(placement, said, caplog):
    alarm = Alarm(placement, "r", lambda: ["a hangs"])
    alarm.look()
    assert said in caplog.text
    assert "1 alerts did not reach" in caplog.text


def test_a_command_that_hangs_holds_up_nobody(monkeypatch, caplog):
    monkeypatch.setattr(module, "WITHIN_S", 0.2)
    placement = Placement(
        alert_command=f"{sys.executable} -c 'import time; time.sleep(60)'"
    )
    alarm = Alarm(placement, "r", lambda: ["a hangs"])
    began = time.monotonic()
    alarm.start()
    assert time.monotonic() - began < 10
    alarm.close(30.0)
    assert not alarm._thread.is_alive()
    assert "timed out" in caplog.text


def test_a_shell_does_not_run_it(tmp_path):
    placement = Placement(alert_command=f"echo x ; touch {tmp_path / 'made'}")
    Alarm(placement, "r", lambda: ["a hangs"]).look()
    assert not (tmp_path / "made").exists()
