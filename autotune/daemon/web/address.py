"""Where the page is served, and to whom."""

from __future__ import annotations

import ipaddress

from autotune.errors import UsageError

#: A variable with what readers from elsewhere must know.
TOKEN = "AUTOTUNE_WEB_TOKEN"


def address_of(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, where the host may be an IPv6 address in brackets.

    Raises:
        UsageError: it is none.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--web {text!r} is no address", advice="write it as 127.0.0.1:8080.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(web: str, token: str | None) -> None:
    """Refuse to be reached from elsewhere by everybody.

    Args:
        web: ``HOST:PORT``.

    Raises:
        UsageError: it is no address, or no token guards it.
    """
    if not is_loopback(address_of(web)[0]) and not token:
        raise UsageError(f"{web} can be reached from elsewhere", advice=f"set {TOKEN} to a long secret.")
