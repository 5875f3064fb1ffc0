"""Ports for processes that a test starts."""

import os
import random
import socket


def free_port() -> int:
    """One that nothing listens on. Not of those that the system chooses from: another test's server
    could get it before the process listens."""
    choose = random.Random(os.urandom(8))
    while True:
        port = choose.randrange(10_000, 32_000)
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
