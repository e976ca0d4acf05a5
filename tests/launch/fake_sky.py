"""A `sky` that knows the commands which `diloco launch` uses; see `fake_gcloud`.

Jobs are kept in FAKE_CLOUD/jobs.json. Options are those of SkyPilot 0.14.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import yaml

FLAGS = {
    "launch": ({"--name", "--env", "--secret", "--config"}, {"--yes", "--detach-run"}),
    "queue": ({"--output", "--limit"}, {"--all", "--refresh", "--skip-finished"}),
    "cancel": ({"--name"}, {"--yes", "--all"}),
    "logs": ({"--name", "--tail"}, {"--follow", "--no-follow", "--controller"}),
}
ENDED = ("SUCCEEDED", "CANCELLED", "FAILED")


def main(arguments: list[str]) -> int:
    """Runs one command line."""
    folder = Path(os.environ["FAKE_CLOUD"])
    with (folder / "calls.jsonl").open("a") as calls:
        print(json.dumps(["sky", *arguments]), file=calls)
    group, verb, *words = arguments
    if group != "jobs" or verb not in FLAGS:
        return fail(f"No such command '{group} {verb}'")
    values, switches = FLAGS[verb]
    names, flags = [], {}
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            names.append(word)
        elif word in switches:
            flags[word] = ""
        elif word in values and words:
            flags[word] = words.pop(0)
        else:
            return fail(f"No such option: {word}")
    return act(folder / "jobs.json", verb, names, flags)


def act(path: Path, verb: str, names: list[str], flags: dict[str, str]) -> int:
    """Changes or shows what there is."""
    jobs = json.loads(path.read_text())
    if verb == "queue" and not jobs:
        print("Error: No in-progress managed jobs.", file=sys.stderr)
        return 1
    if verb == "queue":
        print("Fetching managed job statuses...")
        print(json.dumps(jobs if "--all" in flags else jobs[-50:], indent=2))
    elif verb == "launch":
        if "--yes" not in flags:
            return fail("Aborted!")
        (file,) = names
        task = yaml.safe_load(Path(file).read_text())
        job = {"job_id": len(jobs) + 1, "job_name": flags["--name"], "task": task}
        jobs.append({**job, "status": "PENDING"})
    elif verb == "cancel":
        for job in jobs:
            if job["job_name"] == flags["--name"] and job["status"] not in ENDED:
                job["status"] = "CANCELLED"
    else:
        print(f"logs of {flags['--name']}")
    path.write_text(json.dumps(jobs))
    return 0


def fail(text: str) -> int:
    """As sky says it."""
    print(f"Error: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
