"""Fleets of many chips: the time that failures, speeds and links leave to them."""
