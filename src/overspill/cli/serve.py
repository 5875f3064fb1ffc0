"""`overspill serve`."""

import importlib.util
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from overspill.cli.arguments import Model
from overspill.cli.flags import with_flags
from overspill.core.errors import ConfigError
from overspill.core.garbage import short_collections
from overspill.server.settings import ServerConfig

if TYPE_CHECKING:
    from overspill.server.service import Service

PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")
_HELP = """Serve a Mixture-of-Experts model that may be larger than the GPU with OpenAI's API.

Clients of OpenAI's API use it by the address that is printed; a browser shows a page there. \
SIGTERM or Ctrl-C finishes the answers in progress, a second one ends at once.

[bold]Examples[/bold]

  overspill serve runs/nano

  overspill serve Qwen/Qwen3-30B-A3B --gpu-memory 20GiB --api-key-file keys.txt --host 0.0.0.0

  overspill serve Qwen/Qwen3-30B-A3B --adapter runs/adapter

  overspill serve facebook/nllb-moe-54b --fix-nllb-routing --src-lang eng_Latn --tgt-lang fra_Latn
"""
_LOCAL = ("127.0.0.1", "::1", "localhost")


def add_to(app: typer.Typer) -> None:
    command = with_flags(_serve, {"model": Model}, ServerConfig.settings())
    app.command("serve", help=_HELP)(command)


def _serve(model: str, as_json: bool, **flags: Any) -> None:
    """Serve a model until a signal. With --json the address is one line of JSON."""
    config = ServerConfig.make({name: value for name, value in flags.items() if value is not None})
    keys = config.read_keys()
    config.allowed_origins  # noqa: B018 - the property checks them
    _check_installed()
    config.decoder.check(model, config.model.check(model, needs_text=False))
    # Imported only after the flags are checked.
    from overspill.server.run import address_of, bind, serve
    from overspill.server.service import Service

    with _log_to_stderr(), bind(config) as bound:
        if config.address.host not in _LOCAL and not keys:
            _warn_open(config.address.host)
        # a full garbage collection would stop all answers for a quarter of a second
        with config.model.open(model) as llm, short_collections():
            service, url = Service(llm, model, config, keys), address_of(bound)
            drained = serve(service, bound, lambda: _announce(service, url, bool(keys), as_json))
    if not drained:  # the exit of Python takes seconds
        sys.stdout.flush()
        os._exit(0)


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    logger, handler = logging.getLogger("overspill"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _warn_open(host: str) -> None:
    print(
        f"warning: everyone who reaches {host} can use this server; give --api-key-file to allow "
        "only clients with a key",
        file=sys.stderr,
    )


def _check_installed() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        needed = f"overspill serve needs {', '.join(missing)}"
        raise ConfigError(f"{needed}; run pip install '.[serve]' in the checkout of Overspill")


def _announce(service: "Service", address: str, with_key: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": address, "model": service.name, "pid": os.getpid()}), flush=True)
        return
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    path = "chat/completions"
    if service.llm.has_encoder:
        path, asked = "completions", {"prompt": "Hello"}
    key = ' -H "Authorization: Bearer $OVERSPILL_API_KEY"' if with_key else ""
    of = "" if service.base is None else f" (an adapter of {service.base})"
    print(
        f"Serving {service.name}{of} at {address} (for OpenAI's clients: {address}/v1)\n"
        f"  curl {address}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps({'model': service.name, **asked}))}",
        flush=True,
    )
