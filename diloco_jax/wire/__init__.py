"""Messages between islands and the coordinator, over gRPC and mutual TLS.

`Client` is an island's end, `Server` the coordinator's; `errors` is what can go wrong.
"""

import os

# gRPC's core writes to standard error on its own; what matters arrives as a WireError.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
