"""Take a picture of a run's dashboard, in Chromium.

    python docs/figures/dashboard.py WORKDIR OUT.png [--size 1280x900] [--dark]

Pictures have 256 colours, so that they stay below 150 kB. Those of docs/dashboard.md
are made by `first_run.sh`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))

from browser import Browser
from test_dashboard_app import start, stop

DRAWN = "Number(document.body?.dataset.drawn) > 0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="1280x900")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        process, port = start(given.workdir)
        try:
            with Browser(Path(scratch) / "profile") as browser:
                width, height = map(int, given.size.split("x"))
                scheme = "dark" if given.dark else "light"
                browser.open(f"http://localhost:{port}/", width, height, scheme)
                browser.wait(DRAWN)
                browser.wait("document.querySelectorAll('#events tbody tr').length > 0")
                browser.wait("document.getElementById('notice').hidden")
                browser.picture(given.out, whole=False)
                for trouble in browser.troubles():
                    print("trouble:", trouble)
        finally:
            stop(process)
    with Image.open(given.out) as picture:
        few = picture.convert("RGB").quantize(256)
    few.save(given.out, optimize=True)
    print(given.out, given.out.stat().st_size)


if __name__ == "__main__":
    main()
