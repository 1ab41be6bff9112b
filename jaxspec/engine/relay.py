"""A relay to JAX's service in rank 0, which hides the service's end: JAX would write twenty lines and end the process with a status
of its own, before the thread that waits for the group's end has said which process is gone."""

import contextlib
import socket
import threading
import time

PAUSE = 0.1
"""Seconds between two tries to connect: rank 0 may not listen yet."""


def relay(address: tuple[str, int]) -> str:
    """HOST:PORT on this machine of a relay that passes bytes to and from the service at this address, but not the service's end.

    Raises OSError if no port is free.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=[listener, address], name="relay", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def _accept(listener: socket.socket, address: tuple[str, int]) -> None:
    while True:
        near, _ = listener.accept()
        threading.Thread(target=_serve, args=[near, address], name="relay", daemon=True).start()


def _serve(near: socket.socket, address: tuple[str, int]) -> None:
    """One connection, until the near end closes it."""
    while True:
        with contextlib.suppress(OSError):
            far = socket.create_connection(address)
            break
        time.sleep(PAUSE)
    threading.Thread(target=_pass_on, args=[far, near], name="relay", daemon=True).start()
    _pass_on(near, far)
    with contextlib.suppress(OSError):
        far.shutdown(socket.SHUT_RDWR)  # to close it would say nothing while a thread waits for its bytes
    far.close()
    near.close()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Until the source ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
