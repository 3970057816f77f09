"""InfiniStore's server, but for the one thing that an ordinary user may not do: exempting itself from the OOM killer."""
import socket
import sys

from infinistore import server

with socket.create_server(("127.0.0.1", 0)) as free:
    sys.argv += ["--manage-port", str(free.getsockname()[1])]
server.prevent_oom = lambda: None
server.main()
