"""The settings of `overspill serve`."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from overspill.core.errors import ConfigError
from overspill.core.options import Count, NotNegativeInt, Rule, Size
from overspill.core.sizes import parse_size
from overspill.serve.config import DecoderSection, ModelSection
from overspill.train.settings import Config

KEY_VARIABLE = "OVERSPILL_API_KEY"

_PORT = Rule("a port from 0 to 65535", lambda value: 0 <= value <= 65535)
_POSITIVE = Rule("more than 0", lambda value: value > 0)
Seconds = Annotated[float, _POSITIVE]


@dataclass(frozen=True)
class AddressSection:
    """Address"""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: Annotated[int, _PORT] = 8000
    """Port to listen on; 0 takes a free one."""
    served_name: str | None = None
    """Name of the model for clients; default: the name of its folder or repository."""


@dataclass(frozen=True)
class AccessSection:
    """Access"""

    api_key: str | None = None
    """Key that clients must send. Other users of this machine can see it in the list of processes;
    prefer --api-key-file, or the environment variable OVERSPILL_API_KEY."""
    api_key_file: str | None = None
    """File with the keys that clients may send, one in each line."""
    allow_origin: str | None = None
    """Origins of web pages that may use this server, such as https://example.com, separated by
    commas; * allows all."""
    log_requests: bool = False
    """Write the body of each request, with its prompt, to the log; never keys."""


@dataclass(frozen=True)
class LimitSection:
    """Limits"""

    max_queue: NotNegativeInt = 64
    """Answers that may wait for others to finish; more get status 429."""
    max_body: Size = "4MiB"
    """Largest body of a request; larger ones get status 413."""
    body_timeout: Seconds = 30.0
    """Seconds in which the body of a request must arrive."""
    request_timeout: Seconds = 600.0
    """Seconds that an answer may take, with the time it waits."""
    max_connections: Count = 512
    """Connections that may be open at once; requests of further ones get status 503."""

    @property
    def body_bytes(self) -> int:
        return parse_size(self.max_body, "--max-body")


@dataclass(frozen=True)
class ServerConfig(Config):
    """All settings of `overspill serve`."""

    command: ClassVar[str] = "serve"
    address: AddressSection = field(default_factory=AddressSection)
    access: AccessSection = field(default_factory=AccessSection)
    limits: LimitSection = field(default_factory=LimitSection)
    model: ModelSection = field(default_factory=ModelSection)
    decoder: DecoderSection = field(default_factory=DecoderSection)
    """For completions that do not say otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address.served_name is not None and not self.address.served_name.strip():
            raise ConfigError("--served-name is empty; give a name, or leave it out")

    def read_keys(self) -> tuple[str, ...]:
        """Return the keys of --api-key, --api-key-file and the environment; empty if there are
        none."""
        keys = [] if self.access.api_key is None else [("--api-key", self.access.api_key)]
        if KEY_VARIABLE in os.environ:
            keys.append((KEY_VARIABLE, os.environ[KEY_VARIABLE]))
        if self.access.api_key_file is not None:
            keys += [("--api-key-file", key) for key in _read_lines(self.access.api_key_file)]
        for source, key in keys:
            if not key or not all("!" <= letter <= "~" for letter in key):
                raise ConfigError(
                    f"a key of {source} is empty, or has spaces or letters that are not ASCII; "
                    "HTTP headers cannot carry it"
                )
        return tuple(dict.fromkeys(key for _, key in keys))

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        given = (self.access.allow_origin or "").split(",")
        origins = tuple(origin.strip().rstrip("/") for origin in given if origin.strip())
        for origin in origins:
            if origin != "*" and not _is_origin(origin):
                raise ConfigError(
                    f"--allow-origin {origin} is not an origin; write it like https://example.com"
                )
        return origins


def _is_origin(text: str) -> bool:
    try:
        return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)
    except ValueError:
        return False


def _read_lines(name: str) -> list[str]:
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"--api-key-file {path} cannot be read ({error.strerror}); check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--api-key-file {path} is not a text file") from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"--api-key-file {path} is empty; write one key in each line")
    return keys
