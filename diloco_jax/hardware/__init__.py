"""Facts of machines: slices, chips, machine types, measured rates, the TPU here."""
