"""A lead's process that is killed: it has workers begin, and does what it is told.

`python lead_process.py WORKDIR`: answers with a line of JSON, the addresses of the
workers and a ticket for the take of tick 1 of fragment 0. Each line of standard input
then is a word: `merge` orders a merge of that take and answers once it is prepared.
"""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

from runtime_support import hello
from worker_support import FIRST, merge_of, of_workers

from diloco_jax.config.loading import read_config_json
from diloco_jax.protocol.holding import (
    Committed,
    DeltaArrived,
    MergePrepared,
    RestoreFragments,
)
from diloco_jax.protocol.messages import TakeRequest


def main(workdir: Path) -> None:
    config = read_config_json(workdir / "config.json")
    workers = of_workers(config, workdir)
    first = tuple(
        Committed(fragment=f, version=FIRST, digests={})
        for f in range(config.run.sync.fragments)
    )
    workers.restore(RestoreFragments(fragments=first))
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    workers.answer(heard.put, heard.put)
    take = workers.completed(hello(config), TakeRequest(fragment=0, tick=1))
    shown = workers.processes()
    say(
        addresses=[worker.address for worker in shown],
        pids=[worker.pid for worker in shown],
        ticket=take.ticket.hex(),
    )
    for word in sys.stdin:
        assert word.strip() == "merge"
        while not isinstance(heard.get(), DeltaArrived):
            pass
        workers.hold(merge_of(0))
        while not isinstance(found := heard.get(), MergePrepared):
            pass
        say(digest=found.prepared.digest)


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
