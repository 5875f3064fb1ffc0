"""Hands open files to the other ranks of a node, over unix sockets.

A descriptor that is sent in this way stays valid if its sender is killed, and needs neither a name
in a file system nor the right to look into another process. The sockets have abstract names:
nothing of them remains.
"""

import contextlib
import os
import socket
import struct
import uuid

from overspill.core.errors import RankError
from overspill.parallel.ranks import Ranks

_SECONDS = 30.0
_HEADER = struct.Struct("=i16s")  # the sender's rank, and the secret of the receiver


def exchange_files(ranks: Ranks, file: int) -> list[int]:
    """The files of all ranks as descriptors of this process; its own is -1. The caller closes
    them. All ranks must call it. Raises RankError on those that could not reach another one."""
    # other users of the machine see the names of sockets, but do not know the secret
    name, secret = f"\0overspill-{uuid.uuid4().hex}", uuid.uuid4().bytes
    files = [-1] * ranks.size
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.settimeout(_SECONDS)
        with contextlib.suppress(OSError):  # the others cannot connect then
            listener.bind(name)
            listener.listen(ranks.size)
        peers = ranks.gather((name, secret))
        try:
            for rank, (address, expected) in enumerate(peers):
                if rank != ranks.rank:
                    _send(address, _HEADER.pack(ranks.rank, expected), file)
            while -1 in files[: ranks.rank] + files[ranks.rank + 1 :]:
                sender, received = _receive(listener, secret)
                if received is not None:
                    files[sender] = received
        except OSError as error:
            close_files(files)
            raise RankError(
                f"rank {ranks.rank} cannot share host memory with the others ({error}): all ranks "
                'must run on one machine and in one container; or use Settings(placement="static")'
            ) from error
    return files


def _send(address: str, header: bytes, file: int) -> None:
    """Does not wait for the receiver: the socket holds the message until it is accepted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sender:
        sender.settimeout(_SECONDS)
        sender.connect(address)
        socket.send_fds(sender, [header], [file])


def _receive(listener: socket.socket, secret: bytes) -> tuple[int, int | None]:
    """The sender's rank and its file; None from a stranger."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(_SECONDS)
        header, files, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
    if len(header) == _HEADER.size and len(files) == 1:
        sender, found = _HEADER.unpack(header)
        if found == secret:
            return sender, files[0]
    close_files(files)
    return -1, None


def close_files(files: list[int]) -> None:
    """Close the files that are open (not -1)."""
    for file in files:
        if file >= 0:
            os.close(file)
