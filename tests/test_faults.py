import math
import os
import signal
import subprocess
import sys

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.faults import Fault, parse_faults, worker_name

ISLANDS = ["v5p-a", "v6e"]


@pytest.mark.parametrize(
    ("text", "who", "incarnation", "step", "action", "amount"),
    [
        ("v5p-a@40:kill", "v5p-a", 1, 40, "kill", 0.0),
        ("v6e@7:pause15", "v6e", 1, 7, "pause", 15.0),
        ("v6e#2@3:pause0.5", "v6e", 2, 3, "pause", 0.5),
        ("coordinator@12:kill", "coordinator", 1, 12, "kill", 0.0),
        ("v6e@5:hang", "v6e", 1, 5, "hang", 0.0),
    ],
)
def test_forms(text, who, incarnation, step, action, amount):
    (found,) = parse_faults([text], ISLANDS).faults
    wanted = Fault(
        who=who, incarnation=incarnation, step=step, action=action, amount=amount
    )
    assert found == wanted


@pytest.mark.parametrize("action", ["kill5", "pause", "pause-1", "slow0.5", "nan2"])
def test_another_form_is_refused_with_the_forms(action):
    with pytest.raises(ConfigError, match="the forms are"):
        parse_faults([f"v6e@5:{action}"], ISLANDS)


def test_for_who_keeps_the_incarnation_apart():
    faults = parse_faults(["v6e@1:kill", "v6e#2@3:kill", "v5p-a@9:kill"], ISLANDS)
    assert [f.step for f in faults.for_who("v6e").faults] == [1]
    assert [f.step for f in faults.for_who("v6e", 2).faults] == [3]
    assert faults.for_who("v6e", 3).faults == ()


def test_faults_of_parameters_are_those_of_all_hosts_and_strike_no_process():
    faults = parse_faults(["v6e@3:nan", "v6e@5:scale-2.5", "v6e@5:kill"], ISLANDS)
    for host in (0, 1):
        own = faults.for_who("v6e", host=host)
        assert math.isnan(own.factor(3))
        assert (own.factor(4), own.factor(5)) == (None, -2.5)
        own.fire(3)
    assert [fault.kills for fault in faults.faults] == [False, False, True]
    with pytest.raises(ConfigError, match="has no parameters of its own"):
        parse_faults(["coordinator@3:nan"], ISLANDS)


def test_steps_and_batches_are_slow_from_a_step_on():
    faults = parse_faults(["v6e@3:slow4", "v6e@5:starve0.5", "v6e@7:slow1"], ISLANDS)
    own = faults.for_who("v6e")
    assert [own.slowdown(step) for step in (2, 3, 6, 7)] == [1.0, 4.0, 4.0, 1.0]
    assert [own.starved_s(step) for step in (4, 5, 9)] == [0.0, 0.5, 0.5]
    assert not any(fault.kills for fault in faults.faults)
    own.fire(3)
    assert parse_faults(["v6e@0:scale2"], ISLANDS).for_who("v6e").factor(0) == 2.0
    with pytest.raises(ConfigError, match="makes no steps"):
        parse_faults(["coordinator@3:starve1"], ISLANDS)


def fire(action: str, step: int) -> "subprocess.Popen[bytes]":
    code = (
        "from diloco_jax.faults import parse_faults\n"
        f"parse_faults(['a@3:{action}'], ['a']).for_who('a').fire({step})\n"
    )
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_hang_never_returns():
    hanging = fire("hang", 3)
    with pytest.raises(subprocess.TimeoutExpired):
        hanging.wait(2.0)
    hanging.kill()
    hanging.wait(60)


def test_kill_and_no_fault():
    struck, spared = fire("kill", 3), fire("kill", 2)
    assert struck.wait(60) == -signal.SIGKILL
    assert spared.wait(60) == 0


def test_pause_stops_and_continues():
    process = fire("pause0.3", 3)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert process.wait(60) == 0


def test_workers_are_struck_by_their_own_merges_in_one_of_their_lives():
    texts = ["worker-1@4:kill-prepared", "worker-1#2@7:kill", "coordinator@9:kill"]
    faults = parse_faults(texts, ISLANDS, workers=2)
    (first,) = faults.for_who(worker_name(1)).faults
    assert (first.step, first.prepared) == (4, True)
    (second,) = faults.for_who(worker_name(1), 2).faults
    assert (second.step, second.prepared) == (7, False)
    assert faults.for_who(worker_name(0)).faults == ()
    with pytest.raises(ConfigError, match="there is no 'worker-1'"):
        parse_faults(texts, ISLANDS)
