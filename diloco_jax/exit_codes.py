"""How the commands and processes of this project end; whatever else means a crash.

Neither `EXIT_CONFIG` nor `EXIT_REFUSED` is cured by another attempt.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""Bad arguments or config."""
EXIT_REFUSED = 3
"""Refused by the peer."""
