"""Bind this process's life to the launcher's, then exec: PARENT_PID COMMAND...

Run as a script, on Linux. The kernel kills the process when the thread that started it
ends (`processes.py`); this setting survives the exec. (Making it between fork and exec
in the launcher itself is not safe once the launcher has threads.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind and exec; never return."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # The launcher died before the call above.
        sys.exit("the launcher is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
