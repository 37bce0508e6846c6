"""Headers: what every answer tells a browser it may do with it. Whoever answers may have said it more exactly."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""An answer of the API is no page: it loads nothing and stands in no frame. The dashboard's pages have their own."""

ALWAYS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
NO_STORE = (b"cache-control", b"no-store")
STRICT_TRANSPORT = (b"strict-transport-security", b"max-age=31536000")


class SecurityHeaders:
    """Adds them. Answers that do not say how they may be kept are not kept."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        encrypted = scope.get("scheme") == "https"

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _completed(list(message.get("headers", ())), encrypted=encrypted)
            await send(message)

        await self._app(scope, receive, marked)


def _completed(headers: list[tuple[bytes, bytes]], *, encrypted: bool) -> list[tuple[bytes, bytes]]:
    said = {name.lower() for name, _ in headers}
    headers += [header for header in ALWAYS if header[0] not in said]
    if not said & {b"cache-control", b"etag"}:
        headers.append(NO_STORE)
    if encrypted:
        headers.append(STRICT_TRANSPORT)
    return headers
