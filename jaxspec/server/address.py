"""Where the server listens."""

import socket
from ipaddress import ip_address


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address; connections are accepted once the server runs. Raises OSError if it can't be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """True if only this machine can connect."""
    return ip_address(listener.getsockname()[0]).is_loopback


def url_of(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
