"""What the files of a run are called in its workdir (docs/watching.md says what is in
them)."""

from __future__ import annotations

CONFIG = "config.json"
FACTS = "run.json"
TAPE = "tape.jsonl"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
ROSTER = "roster.msgpack"
CURVES = "tensorboard"
LOG = "log"
"""Durable records."""
LOGS = "logs"
"""Of the processes of `diloco run`."""
CHECKPOINTS = "checkpoints"
CACHE = "jax-cache"
ATTEMPTS = "attempts.json"
ADDRESS = "coordinator.address"
"""Where the coordinator listens, as HOST:PORT."""
PROCESSES = "processes.json"
"""Process ids of everything that runs, by name and then by host."""
