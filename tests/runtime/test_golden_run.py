"""A small run whose files are as they were, and a run of before that goes on.

Islands are nothing but their messages: what they send is the same on every machine, and
nothing is trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from goldens import FOLDER, REGENERATE, as_text, require_golden, shape
from runtime_support import (
    PATIENCE_S,
    await_message,
    await_state,
    await_that,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    took,
    upload_start,
    with_run,
)

from diloco_jax import before_jax, run_files, workdir
from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.core.tiles import digest_arrays
from diloco_jax.observability.failures import NotedFailure
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.messages import Record
from diloco_jax.wire.client import Client

ARCHIVE = FOLDER / "workdir.zip"
"""The workdir of `recorded` as a SIGKILL leaves it, with `KNOWN` in it. REGENERATE=1
writes that of a new format."""
KNOWN = "known.json"
STEPS = 3
"""Steps of each island before each merge."""
MERGES = 2
FIRST = tuple(
    Record(seq=fragment + 1, kind="adopted", step=0, fragment=fragment)
    for fragment in range(2)
)
UNLIKE = (run_files.CACHE, run_files.CURVES)
"""Folders with other names of files on each machine."""


BY_CHANCE = {
    "alerts": ["text"],
    "wrong": ["text"],
    "ignored_messages": {"message": 1},
    "tokens_lost": {"reason": 1},
    "failures": [
        NotedFailure(
            who="a", incarnation=1, began=1.0, why="", ended=2.0, merged=3.0
        ).told(0.0)
    ],
}


@pytest.fixture(scope="module")
def recorded(text, tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The workdir of a run that was stopped, and its last status."""
    here = tmp_path_factory.mktemp("golden") / "run"
    config = make_config(text, codec_up="f32", codec_down="f32")
    config = placed(config, watch_every=1, time_budget_s=PATIENCE_S)
    # The archive tells nothing of the machine on which it was made.
    data = dataclasses.replace(config.run.data, paths=("text",))
    config = with_run(config, data=data)
    with anonymous(), coordinator(config, here) as service:
        with talking(config, service, incarnation=1) as islands:
            for number in range(MERGES):
                merge(service, islands, number)
            status = last_status(islands["a"][1], merges=MERGES)
        if REGENERATE and written_format() < workdir.FORMAT:
            archive(here, known(service))
    return here, status


@contextlib.contextmanager
def anonymous() -> Iterator[None]:
    """Within the block, the tape is told no fact that names this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "host")
        for fact in ("_cpu", "_variables"):
            patch.setattr(before_jax, fact, lambda: "")
        yield


@contextlib.contextmanager
def talking(config: Config, service: Coordinator, incarnation: int) -> Iterator[Any]:
    """Hello, client and stream of each island of the config, by name."""
    with contextlib.ExitStack() as clients:
        found = {}
        for name in sorted(config.islands):
            own = hello(
                config, name, incarnation=incarnation, session=f"{name}-{incarnation}"
            )
            who = clients.enter_context(client(service.address))
            found[name] = own, who, who.open_control(own)
        yield found


def merge(service: Coordinator, islands: Any, number: int) -> None:
    """Every island sends a delta of its own of the next fragment; they are merged."""
    before = sum(fragment.merges for fragment in service.lead.state.fragments)
    steps = STEPS * (number + 1)
    for name, (_, _, stream) in islands.items():
        adopted = FIRST if name == "a" and not number else ()
        stream.send(report(name, steps - STEPS + 1, *adopted))
        stream.send(report(name, steps))
    for name, (own, who, stream) in islands.items():
        take = await_message(stream, messages.TakeRequest)
        seq = len(FIRST) * (name == "a") + number + 1
        stream.send(report(name, steps, took(take, seq=seq, steps=steps)))
        total = service.holder.store.layouts_up[take.fragment].total_bytes
        delta = np.full(total // 4, 1e-3 if name == "a" else -5e-4, np.float32)
        start = upload_start(own, stream.welcome.run_id, take, total)
        who.transfers.upload(start, delta.tobytes())
    await_state(service, lambda s: sum(f.merges for f in s.fragments) == before + 1)


def last_status(who: Client, merges: int) -> dict[str, Any]:
    """The status that has these merges; a new one is made about once a second."""
    await_that(lambda: who.status(PATIENCE_S)["merges"] >= merges)
    return who.status(PATIENCE_S)


def report(name: str, steps: int, *records: Record) -> messages.Report:
    """A report: island a says all that an island may say, b the least."""
    measures = messages.Measures(steps=steps)
    if name == "a":
        measures = messages.Measures(
            steps=steps,
            tokens_predicted=64 * steps,
            median_step_seconds=0.5,
            loss=2.5,
            eval_loss=2.25,
            watched_cycle=1,  # It was asked for at the first tick.
            watched_loss=2.25,
        )
    return messages.Report(
        phase="training",
        steps=steps,
        step_seconds=0.01,
        records=records,
        measures=measures,
        watches=name == "a",
    )


def known(service: Coordinator) -> dict[str, Any]:
    """Facts that a later life must find, once it has restored all fragments."""
    for back in service.holder._back.values():
        back.result(PATIENCE_S)
    state, config = service.lead.state, service.lead.config
    totals, store = ledger.run_totals(config, state), service.holder.store
    return {
        "run_id": config.run_id,
        "fingerprint": config.fingerprint,
        "versions": [list(fragment.version) for fragment in state.fragments],
        "tokens_merged": totals.merged,
        "tokens_merged_by_fragment": ledger.merged_by_fragment(state),
        "incarnations": {n: i.incarnation for n, i in sorted(state.islands.items())},
        "next_position": state.next_position,
        "anchors": [
            digest_arrays(store.arrays(fragment)["anchor"])
            for fragment in range(len(state.fragments))
        ],
    }


def test_the_files_of_a_run_are_what_they_were(recorded):
    """Names, and the fields of what is JSON; `test_golden.py` has the tape's lines."""
    here, status = recorded
    of_kind: dict[str, list[Any]] = {}
    for line in read_metrics(here):
        of_kind.setdefault(line["kind"], []).append(line)
    begun = next(read_tape(here / run_files.TAPE))
    found = {
        "files": sorted({re.sub(r"\d+", "N", name) for name in files(here)}),
        run_files.FACTS: shape(json.loads((here / run_files.FACTS).read_bytes())),
        run_files.SUMMARY: told(workdir.read_summary(here)),
        "status": told(status),
        run_files.METRICS: {kind: shape(*of_kind[kind]) for kind in sorted(of_kind)},
        "environment": shape(begun["environment"]),
    }
    require_golden("run_files.json", as_text(found))


def told(facts: dict[str, Any]) -> Any:
    """The shape of a summary or a status, as if a slow machine had raised an
    alert, and a connection had failed."""
    facts = {name: BY_CHANCE.get(name, value) for name, value in facts.items()}
    return shape(facts, open_at=("islands", "ignored_messages", "tokens_lost"))


@pytest.mark.usefixtures("recorded")
def test_a_run_of_before_goes_on_or_is_refused_by_its_format(tmp_path):
    with zipfile.ZipFile(ARCHIVE) as written:
        written.extractall(run := tmp_path / "run")
    if (found := written_format()) != workdir.FORMAT:
        with pytest.raises(ConfigError) as refused:
            workdir.read_config(run)
        for format in (found, workdir.FORMAT):
            assert f"format {format}" in str(refused.value)
        return
    config = workdir.read_config(run)
    left = json.loads((run / KNOWN).read_bytes())
    with coordinator(config, run, init=False) as service:
        assert known(service) == left
        with talking(config, service, incarnation=2) as islands:
            merge(service, islands, 0)
        assert known(service)["tokens_merged"] > left["tokens_merged"]
    kinds = [line["kind"] for line in read_tape(run / run_files.TAPE)]
    assert kinds.count("merged") == MERGES + 1
    assert kinds.count("recovered") == 1


def archive(here: Path, facts: dict[str, Any]) -> None:
    """Write `ARCHIVE` of a workdir that is in use."""
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_LZMA) as written:
        for name in files(here):
            written.write(here / name, name)
        written.writestr(KNOWN, as_text(facts))


def written_format() -> int:
    """The format of the run in the archive; 0 if there is none."""
    if not ARCHIVE.exists():
        return 0
    with zipfile.ZipFile(ARCHIVE) as written:
        return json.loads(written.read(run_files.FACTS))["format"]


def files(folder: Path) -> list[str]:
    """The names of all files of a workdir but those of `UNLIKE`."""
    found = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
    return [str(path) for path in found if path.parts[0] not in UNLIKE]
