"""Fleets of many chips: what failures, speeds and links leave of their time."""
