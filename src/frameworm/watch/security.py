"""Who may see the page: anyone who has the token, under host names that cannot belong to another site."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHORTEST_TOKEN = 16
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)
_REFUSAL = b"403: open the address that `frameworm watch` printed, with its token\n"
_READING = ("GET", "HEAD")
_MOST_QUERY_BYTES = 8_192


def host_names(host: str) -> frozenset[str]:
    """Host names of a server bound to `host`, besides addresses; lower case, without ports."""
    names = {"localhost", host.lower()}
    if not is_loopback(host):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return frozenset(names)


def is_loopback(host: str) -> bool:
    """Whether an address or name is only reachable from this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Guards the whole application: without the token, every request gets the same 403.

    The token is read from `?token=`, from the cookie that the page then sets, or from an `Authorization: Bearer`
    header. A `Host` header that is neither an address nor one of `names` is rejected, so that a web site whose name is
    pointed at this machine (DNS rebinding) cannot read the page through a visitor's browser.

    Args:
        app: The guarded application.
        token: At least 16 characters.
        names: Accepted host names.
        cookie: Name of the cookie; servers on other ports of the host need other names.
    """

    def __init__(self, app: ASGIApp, token: str, names: Iterable[str], cookie: str) -> None:
        assert len(token) >= SHORTEST_TOKEN, "a short token can be guessed"
        self._app = app
        self._token = token.encode()
        self._names = frozenset(names)
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a web socket that is not accepted is closed with 403
        headers = {name.lower(): value for name, value in scope["headers"]}
        by_address = self._is_token(_token_in_query(scope["query_string"]))
        known = by_address or self._is_token(self._token_in_headers(headers))
        if not known or not self._is_ours(headers.get(b"host", b"")):
            await _plain(send, 403, _REFUSAL)
            return
        if scope["method"] not in _READING:
            await _plain(send, 405, b"405: nothing here can be changed\n")
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                mine = {name for name, _ in HEADERS}
                kept = [item for item in message.get("headers", ()) if item[0].lower() not in mine]
                message["headers"] = [*kept, *HEADERS, *([self._set_cookie()] if by_address else [])]
            await send(message)

        await self._app(scope, receive, send_guarded)

    def _is_token(self, found: bytes | None) -> bool:
        return found is not None and hmac.compare_digest(found, self._token)

    def _token_in_headers(self, headers: dict[bytes, bytes]) -> bytes | None:
        kind, _, value = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer":
            return value.strip()
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return None
        found = cookies.get(self._cookie)
        return None if found is None else found.value.encode("utf-8")

    def _set_cookie(self) -> tuple[bytes, bytes]:
        text = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"
        return b"set-cookie", text.encode("latin-1")

    def _is_ours(self, header: bytes) -> bool:
        name = _host_name(header.decode("latin-1"))
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _token_in_query(query: bytes) -> bytes | None:
    if b"token" not in query or len(query) > _MOST_QUERY_BYTES:
        return None
    try:
        found = parse_qs(query.decode("latin-1"), encoding="utf-8", max_num_fields=32).get("token")
    except ValueError:
        return None
    return None if not found else found[0].encode("utf-8", errors="replace")


def _host_name(header: str) -> str:
    """The name in a `Host` header, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].rstrip(".")


async def _plain(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
