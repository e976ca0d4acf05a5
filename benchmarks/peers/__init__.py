"""The same work with this package and with others: `python -m benchmarks.peers`."""
