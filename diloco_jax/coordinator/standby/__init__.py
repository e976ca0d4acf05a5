"""The shell around `protocol/standby/`: primary and standby, as processes."""
