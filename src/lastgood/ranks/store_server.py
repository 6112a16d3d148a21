"""The process that holds a store of the nodes: `python -m lastgood.ranks.store_server`. Decides nothing.

It serves torch's store on a socket that it receives, until its supervisor ends (supervisor/held_store.py).
"""

from __future__ import annotations

import secrets
import signal
import socket
import sys

from ..io import processes
from ..supervisor import program

ID = "lastgood.store"
"""the key of the id of a store: a new store at the same endpoint has another id"""


def main() -> None:
    """Serve until the supervisor ends."""
    program.forget_current_folder()
    processes.die_with(int(sys.argv[2]))
    processes.outlive_signals()  # guard: store-outlives-signals
    listening = socket.socket(fileno=int(sys.argv[1]))
    port = int(listening.getsockname()[1])
    from torch.distributed import TCPStore

    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    store.set(ID, secrets.token_hex(8))
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
