"""Conversion of exceptions to errors for clients, and their log."""

import logging
import traceback

from starlette.types import ASGIApp, Receive, Scope, Send

from overspill.core.errors import ConfigError, OverspillError
from overspill.server.errors import ApiError, failed, timed_out
from overspill.server.sampling import refused
from overspill.server.settings import ServerConfig

log = logging.getLogger("overspill.server")


def explain(
    error: BaseException, config: ServerConfig, schema_field: str = "response_format"
) -> ApiError:
    """Return the error for a client; `schema_field` is the field of the request that has the schema
    of its answer. Failures that the client has not caused are logged."""
    if isinstance(error, ApiError) and error.status < 500:
        return error
    if isinstance(error, ConfigError):
        return refused(error, schema_field)
    if isinstance(error, TimeoutError):
        return timed_out(config.limits.request_timeout)
    cause = error.__cause__ if isinstance(error, ApiError) else error
    if cause is not None:
        log.error("a request failed: %s", describe(cause, config.access.log_requests))
    return error if isinstance(error, ApiError) else failed()


def describe(error: BaseException, with_prompts: bool) -> str:
    """Return an error with its traceback. Messages of errors that are not about the machine may
    contain a part of a prompt, and are left out unless prompts are logged."""
    told = isinstance(error, OverspillError | OSError | MemoryError | RuntimeError)
    lines = "".join(traceback.format_tb(error.__traceback__))
    message = str(error) if with_prompts or told else "(message not logged)"
    return f"{type(error).__name__}: {message}\n{lines}".rstrip()


class Failures:
    """Middleware that logs unexpected exceptions of the application, after it has answered."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            log.error("a request failed: %s", describe(error, self._config.access.log_requests))
