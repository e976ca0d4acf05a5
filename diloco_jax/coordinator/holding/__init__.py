"""What holds fragments: their deltas, arrays, merges and files. It knows no lead."""
