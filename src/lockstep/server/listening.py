"""Where the server listens: an address that is safe without a key, taken before anything is opened, and open to
clients only once all that can be known of what will be served is known to be right."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from lockstep.errors import UsageError
from lockstep.server.options import ServerOptions

BACKLOG = 2_048
"""Connections that the kernel holds until they are accepted."""


def bind(options: ServerOptions) -> socket.socket:
    """A socket that has its address, and refuses connections until `listen`.

    Raises:
        UsageError: the address does not exist, is taken or forbidden; or it can be reached from elsewhere and there is
            no key.
    """
    family, address = _resolve(options.host, options.port)
    if not options.api_keys and not options.allow_unauthenticated and not _is_loopback(address[0]):
        raise UsageError(
            f"--host {options.host} can be reached from other machines, and there is no key: give --api-key KEY, "
            "listen on 127.0.0.1, or say --allow-unauthenticated"
        )
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it would let two servers have one address
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise UsageError(_refused(options, error)) from error
    return taken


def listen(bound: socket.socket, options: ServerOptions) -> None:
    """Let connections come; UsageError where another process was faster."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise UsageError(_refused(options, error)) from error


def url_of(listener: socket.socket) -> str:
    """The address as clients write it, with the port that was really taken."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(host: str, port: int) -> tuple[int, tuple[str, int]]:
    """The first address of a name, IPv4 before IPv6, as most clients try them on loopback."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(f"--host {host} --port {port} is no address to listen on ({error})") from error
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, (str(address[0]), port)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _refused(options: ServerOptions, error: OSError) -> str:
    where = f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; give another --port, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"{where} is not for this user; give a --port from 1024 on"
    return f"cannot listen on {where}: {error.strerror or error}"
