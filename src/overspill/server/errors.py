"""Errors as OpenAI's server answers them: a status, and a body that clients know."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request cannot be answered. Has the status and the body for its client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        return Response(
            json.dumps(self.body()), self.status, self.headers, media_type="application/json"
        )

    async def send(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a middleware with this error."""
        await self.response()(scope, receive, send)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error for a request whose content is wrong."""
    return ApiError(400, message, param=param, code=code)


def too_busy(message: str) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})


def draining() -> ApiError:
    return ApiError(
        503, "this server is shutting down and takes no more requests", code="draining",
        headers={"Retry-After": "10"},
    )  # fmt: skip


def machine_busy(message: str, param: str | None) -> ApiError:
    """Return an error for a request that may succeed when the machine has less to do."""
    return ApiError(503, message, param=param, code="busy", headers={"Retry-After": "30"})


def timed_out(seconds: float) -> ApiError:
    # the same request would take as long again: OpenAI's client must not repeat it
    return ApiError(
        408,
        f"the answer was not complete after {seconds:g} seconds; ask for fewer tokens, or start "
        "the server with a longer --request-timeout",
        code="request_timeout",
        headers={"x-should-retry": "false"},
    )


def engine_gone() -> ApiError:
    return ApiError(503, "the engine has failed; the server must be started again", code="failed")


def failed() -> ApiError:
    return ApiError(500, "the server failed to answer; its log has the reason", code="server_error")
