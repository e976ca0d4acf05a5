"""What an island computes: parameters, batches and deltas on its own mesh."""
