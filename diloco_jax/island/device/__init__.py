"""The island's computation: parameters, batches and deltas on its own mesh."""
