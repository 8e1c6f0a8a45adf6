"""The address of the web page, and whether it needs a token."""

from __future__ import annotations

import ipaddress

from autotune.base.errors import UsageError

#: Environment variable with the token that clients on other machines must send.
TOKEN = "AUTOTUNE_WEB_TOKEN"


def address_of(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, where the host may be an IPv6 address in brackets.

    Raises:
        UsageError: the text is not an address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--web {text!r} is no address", advice="write it as 127.0.0.1:8080.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether a host can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_token(web: str, token: str | None) -> None:
    """Require a token for an address that other machines can reach.

    Args:
        web: ``HOST:PORT``.

    Raises:
        UsageError: the address is invalid, needs a token and has none, or the token cannot be sent in a header.
    """
    if not is_loopback(address_of(web)[0]) and not token:
        raise UsageError(f"{web} can be reached from elsewhere", advice=f"set {TOKEN} to a long secret.")
    if token is not None and (token != token.strip() or not all(map(str.isprintable, token))):
        raise UsageError(
            f"{TOKEN} has a line break or another character in it that no header can carry",
            advice="leave out what stands around the secret, such as the end of the line of a file.",
        )
