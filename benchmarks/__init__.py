"""Benchmarks: `python -m benchmarks.NAME`, or `python benchmarks/NAME.py`."""

import sys
from pathlib import Path

# The scripts find each other by their names alone, however one of them is started.
sys.path.insert(0, str(Path(__file__).parent))
