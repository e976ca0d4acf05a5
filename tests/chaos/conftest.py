"""The fault matrix and the soak are benchmarks; their parts are tested here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
