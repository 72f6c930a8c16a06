"""Which addresses are public, and a transport that connects to no others: decided of the address that is connected to,
since a name may lead anywhere, and elsewhere the next time."""

from __future__ import annotations

import asyncio
import ipaddress
import socket

import httpx2

_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


class NotPublicError(httpx2.ConnectError):
    """The name leads to no address, or to one that is not public; which of both is nobody's business."""


def is_public(address: str) -> bool:
    """Whether an address is on the internet at large: not loopback, private, link-local (with the metadata of clouds),
    shared, reserved or multicast, and no form of IPv6 that leads to one of those; ValueError where it is none."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast
    if found.ipv4_mapped is not None or found in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)))
    carried = (found.sixtofour, *(found.teredo or ()))
    return found in _UNICAST and found.is_global and all(is_public(str(each)) for each in carried if each is not None)


def is_plainly_private(host: str) -> bool:
    """Whether a URL's host says by itself that it is not public; what a name leads to is known when it is asked."""
    try:
        return not is_public(host.strip("[]"))
    except ValueError:
        name = host.lower().rstrip(".")
        return name in _LOOPBACK_NAMES or name.endswith(".localhost")


class PublicTransport(httpx2.AsyncBaseTransport):
    """Looks a name up, and connects to the very address that it has looked at.

    Args:
        inner: does the rest; certificates are checked for the name all the same.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = request.url
        address = await _public_address(url.host, url.port or (443 if url.scheme == "https" else 80), request)
        pinned = httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,  # Host among them
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )
        return await self._inner.handle_async_request(pinned)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _public_address(host: str, port: int, request: httpx2.Request) -> str:
    """The address that a name leads to; NotPublicError where any of its addresses is not public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    addresses = [str(info[4][0]) for info in found]
    if not addresses or not all(map(is_public, addresses)):
        raise NotPublicError("no public address", request=request)
    return min(addresses, key=lambda address: ":" in address)  # IPv4 first: it is routed everywhere
