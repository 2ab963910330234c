"""The sockets that a server listens on, opened before anything slow is begun."""

from __future__ import annotations

import socket
from typing import Final

from voxlite.engine.errors import InvalidInput

_BACKLOG: Final = 2048


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of a host; port 0 is any free one.

    Raises:
        InvalidInput: the host has no address here, or the port can't be had.
    """
    sockets: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # As asyncio does: `::` leaves the addresses of IPv4 to others.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # A name may stand for an address of each family: both get the same free port.
            port = port or sockets[0].getsockname()[1]
            sock.bind((address[0], port, *address[2:]))
            sock.listen(_BACKLOG)
    except OSError as err:
        for sock in sockets:
            sock.close()
        reason = (err.strerror or str(err)).lower()
        raise InvalidInput(f"can't listen on host {host}, port {port}: {reason}") from err
    return sockets
