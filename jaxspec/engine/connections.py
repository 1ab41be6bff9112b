"""The sockets of a group of hosts (host_group.py): their limits of time, and what tells that the other end is gone."""

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

DEAD = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 5000}
"""A host that loses power closes nothing: after five seconds without an answer of its kernel it counts as gone."""


def connection_of(connected: socket.socket, patience: int) -> Connection:
    """The socket as a connection that sends at once, notices a dead host, and for now waits so many seconds at most."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in DEAD.items():
        if hasattr(socket, name):  # Linux; some are elsewhere
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _limit(connected, patience)
    return Connection(connected.detach())


@contextlib.contextmanager
def closed_after(connected: socket.socket, seconds: float) -> Iterator[None]:
    """Ends the connection unless the work with it is done by then: a peer that sends byte by byte is never late at any one step."""
    with socket.socket(fileno=os.dup(connected.fileno())) as same:
        timer = threading.Timer(seconds, _end, [same])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


def _end(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end was faster
        connected.shutdown(socket.SHUT_RDWR)


def wait_for_ever(link: Connection) -> None:
    """The handshake is over."""
    with socket.socket(fileno=os.dup(link.fileno())) as connected:
        _limit(connected, 0)


def is_gone(link: Connection) -> bool:
    """Whether the other end has closed it."""
    looking = select.poll()
    looking.register(link.fileno(), getattr(select, "POLLRDHUP", 0))  # Linux; elsewhere it is the POLLHUP that is always reported
    return bool(looking.poll(0))


def _limit(connected: socket.socket, seconds: int) -> None:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
