"""Messages and bulk bytes between islands and the coordinator, under mutual TLS.

Control messages go over gRPC, bulk over sockets of its own. `Client` is an island's
end, `Server` the coordinator's; `errors` has all errors of both.
"""

import os

# gRPC's core writes to standard error on its own; what matters arrives as a WireError.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
