"""Access to the HTTP server: request ids, the key that clients must send, and the access log.

The log has a line per request, without anything that a request or its answer contains:

  INFO 3f2a9c0d POST /v1/completions 200 1.234 s, 12 prompt tokens, 64 generated
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import urllib.parse
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from serve_answers import failure

log = logging.getLogger("tilewise.access")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # ids of clients that are kept
_KEY = re.compile(r"[!-~]+")  # printable ASCII without spaces, as a header can carry it


def checked_key(name: str, key: str) -> str:
    """The key, if a client can send it; `name` is what it was given as.

    Raises:
        ValueError: it is empty, or has other characters than printable ASCII without spaces.
    """
    if not _KEY.fullmatch(key):
        given = "is empty" if not key else "has a space or a character that is not printable ASCII"
        raise ValueError(f"{name} {given}, but must be one word of printable ASCII")
    return key


@dataclass
class Account:
    """The facts about a request that the log contains besides its path and status."""

    id: str
    prompt_tokens: int | None = None
    generated_tokens: int = 0


def account_of(scope: Any) -> Account:
    """The account of the request with this ASGI scope."""
    account: Account = scope["state"]["account"]
    return account


class Access:
    """An ASGI application around another one.

    Every answer has the header x-request-id: the one of the request if it consists of at most 64
    letters, digits, dots, underscores and hyphens, otherwise a new one. An exception of the other
    application becomes the answer `fault`, unless an answer has begun, and is raised again.

    Args:
        app: The other application.
        fault: The answer to an exception.
        api_key: Requests below /v1 without ``Authorization: Bearer KEY`` get 401. None: all may
            pass.
    """

    def __init__(
        self, app: Any, fault: Callable[[Exception], Any], api_key: str | None = None
    ) -> None:
        self._app, self._fault = app, fault
        self._api_key = None if api_key is None else checked_key("api_key", api_key)

    async def __call__(
        self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        account = Account(_id_of(Headers(scope=scope)))
        scope.setdefault("state", {})["account"] = account
        status = 0

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = account.id
            await send(message)

        try:
            app = self._app if self._allows(scope) else _unauthorized()
            await app(scope, receive, send_with_id)
        except Exception as error:
            if not status:
                await self._fault(error)(scope, receive, send_with_id)
            raise
        finally:
            _log(scope, account, status, time.monotonic() - began)

    def _allows(self, scope: Any) -> bool:
        if self._api_key is None or not scope["path"].startswith("/v1/"):
            return True
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        # The comparison takes the same time however much of the key is right.
        right = hmac.compare_digest(key.strip(" ").encode("latin-1"), self._api_key.encode())
        return kind.lower() == "bearer" and right


def _unauthorized() -> Any:
    message = "the header authorization must be 'Bearer KEY' with the key of this server"
    return failure(401, message, code="invalid_api_key", www_authenticate="Bearer")


def _id_of(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def _log(scope: Any, account: Account, status: int, seconds: float) -> None:
    """Writes the line of a request. Status 0 means that no answer was begun."""
    tokens = ""
    if account.prompt_tokens is not None:
        tokens = f", {account.prompt_tokens} prompt tokens, {account.generated_tokens} generated"
    # Quoted, so that no path can end the line or pass for the fields after it.
    path = urllib.parse.quote(scope["path"])
    log.info("%s %s %s %d %.3f s%s", account.id, scope["method"], path, status, seconds, tokens)
