"""Take the pictures of docs/dashboard.md, in Chromium.

    PYTHONPATH=. python docs/figures/dashboard.py WORKDIR OUT.png \
        [--size 1280x900] [--dark] [--until PLACE] [--whole]

`WORKDIR` may be `made:ISLANDS`: a run that never was, of half an hour. Pictures have
256 colours, so that they stay below 150 kB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))

from browser import Browser
from made_runs import MadeRun, Outage, write_run
from test_dashboard_app import start, stop

DRAWN = "Number(document.body?.dataset.drawn) > 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir")
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1280x900")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--until", type=int, help="the slider's place, of 1000")
    parser.add_argument("--whole", action="store_true", help="beyond the screen")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        process, port = start(workdir_of(given.workdir, Path(scratch)))
        try:
            with Browser(Path(scratch) / "profile") as browser:
                width, height = map(int, given.size.split("x"))
                scheme = "dark" if given.dark else "light"
                browser.open(f"http://localhost:{port}/", width, height, scheme)
                browser.wait(DRAWN)
                browser.wait("document.querySelectorAll('#events tbody tr').length > 0")
                browser.wait("document.getElementById('notice').hidden")
                if given.until is not None:
                    move(browser, given.until)
                browser.picture(given.out, whole=given.whole)
                for trouble in browser.troubles():
                    print("trouble:", trouble)
        finally:
            stop(process)
    with Image.open(given.out) as picture:
        few = picture.convert("RGB").quantize(256)
    few.save(given.out, optimize=True)
    print(given.out, given.out.stat().st_size)


def move(browser: Browser, place: int) -> None:
    """Move the slider, and wait until all is drawn."""
    drawn = browser.value("document.body.dataset.drawn")
    browser.value(
        f"(u => {{ u.value = {place}; u.dispatchEvent(new Event('input')) }})"
        "(document.getElementById('until'))"
    )
    browser.wait(f"document.body.dataset.drawn !== '{drawn}'")


def workdir_of(given: str, folder: Path) -> Path:
    """Return the workdir, whose name the page shows; make one of `made:ISLANDS`."""
    kind, _, islands = given.partition(":")
    if kind != "made":
        return Path(given)
    outages = (
        Outage(island=1, at_s=500, seconds=60),
        Outage(island=int(islands) // 3 + 1, at_s=1100, seconds=200),
    )
    run = MadeRun(
        islands=int(islands),
        seconds=1800,
        outages=outages,
        coordinator_away=(800, 830),
    )
    return write_run(run, folder / f"pretrain-12b-{islands}-islands")


if __name__ == "__main__":
    main()
