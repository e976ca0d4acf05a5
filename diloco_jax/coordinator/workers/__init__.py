"""Processes that hold fragments for the lead, on its machine and on others."""
