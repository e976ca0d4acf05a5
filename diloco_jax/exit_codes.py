"""Exit codes of the commands and processes of this project; any other is a crash.

Another attempt cures neither `EXIT_CONFIG` nor `EXIT_REFUSED`.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""Bad arguments or config."""
EXIT_REFUSED = 3
"""Refused by the peer."""
