"""Clients of the server, in a process of their own, so that their work does not slow the server.

Asyncio streams instead of an HTTP library: machines with a GPU may have none.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

_LINE = 1 << 20


@dataclass
class Answer:
    """Response to a client."""

    number: int
    """Number of the request in the list."""
    text: str = ""
    tokens: int = 0
    status: int = 0
    error: str | None = None
    left: bool = False
    """The client has disconnected before the end."""
    began: float = 0.0
    times: list[float] = field(default_factory=list)
    """When text arrived, in seconds after `began`."""
    ended: float = 0.0


@dataclass(frozen=True)
class Leave:
    """When a client disconnects: after so many pieces, or so many seconds, whichever is first."""

    pieces: int
    seconds: float


async def ask(
    address: tuple[str, int], number: int, path: str, body: dict[str, Any], patience: float
) -> Answer:
    """Sends a request and reads its answer. `patience` are the seconds that it may send nothing."""
    answer = Answer(number)
    leave = Leave(**body["leave"]) if "leave" in body else None
    sent = {key: value for key, value in body.items() if key != "leave"}
    answer.began = time.perf_counter()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(leave.seconds if leave is not None else None):
            reader, writer = await asyncio.open_connection(*address, limit=_LINE)
            data = json.dumps(sent).encode()
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
                "Content-Type: application/json\r\nConnection: close\r\n"
                f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            await _read(reader, answer, patience, leave)
    except TimeoutError:
        answer.left = leave is not None
        answer.error = None if answer.left else f"nothing for {patience} seconds"
    except (OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        answer.ended = time.perf_counter()
        if writer is not None:
            writer.transport.abort() if answer.left else writer.close()
    return answer


async def _read(
    reader: asyncio.StreamReader, answer: Answer, patience: float, leave: Leave | None
) -> None:
    answer.status = int((await asyncio.wait_for(reader.readline(), patience)).split()[1])
    if answer.status != 200:
        answer.error = (await reader.read()).decode(errors="replace")[-500:]
        return
    # The server writes whole events, so chunks of the encoding do not divide lines; their lengths
    # are lines that do not begin like events.
    while line := await asyncio.wait_for(reader.readline(), patience):
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            answer.error = str(event["error"])
            return
        for choice in event["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content")
            if text:
                answer.text += text
                answer.times.append(time.perf_counter() - answer.began)
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        if leave is not None and len(answer.times) >= leave.pieces:
            answer.left = True
            return
    answer.error = "the connection ended before the answer was complete"


async def _at_once(work: dict[str, Any]) -> list[Answer]:
    """All requests at the same time, each once."""
    address = tuple(work["address"])
    return await asyncio.gather(
        *(
            ask(address, number, work["path"], body, work["patience"])
            for number, body in enumerate(work["bodies"])
        )
    )


async def _load(work: dict[str, Any]) -> list[Answer]:
    """`clients` clients that send one request after another for some seconds; each time, some of
    them disconnect before the end."""
    address, end = tuple(work["address"]), time.perf_counter() + work["seconds"]
    answers: list[Answer] = []

    async def client(number: int) -> None:
        choice = random.Random(number)
        while time.perf_counter() < end:
            chosen = choice.randrange(len(work["bodies"]))
            body = dict(work["bodies"][chosen])
            if choice.random() < work["leaving"]:
                pieces = choice.randrange(1, body["max_tokens"])
                body["leave"] = asdict(Leave(pieces, choice.choice([0.02, 0.3, 60.0])))
            answers.append(await ask(address, chosen, work["path"], body, work["patience"]))
            if answers[-1].error is not None:
                await asyncio.sleep(0.1)  # a server that refuses is not asked in a tight loop

    await asyncio.gather(*(client(number) for number in range(work["clients"])))
    return answers


class Clients:
    """The process of the clients."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def at_once(
        self, address: tuple[str, int], path: str, bodies: Sequence[dict[str, Any]]
    ) -> list[Answer]:
        return self._do({"address": address, "path": path, "bodies": list(bodies)})

    def load(
        self,
        address: tuple[str, int],
        path: str,
        bodies: Sequence[dict[str, Any]],
        clients: int,
        seconds: float,
        leaving: float,
    ) -> list[Answer]:
        """`leaving` is the share of requests whose client disconnects."""
        return self._do(
            {
                "address": address, "path": path, "bodies": list(bodies), "clients": clients,
                "seconds": seconds, "leaving": leaving,
            }
        )  # fmt: skip

    def _do(self, work: dict[str, Any]) -> list[Answer]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"patience": 120.0, **work}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the clients ended ({self._process.wait()})")
        return [Answer(**each) for each in json.loads(line)]


def main() -> None:
    for line in sys.stdin:
        work = json.loads(line)
        answers = asyncio.run(_load(work) if "clients" in work else _at_once(work))
        print(json.dumps([asdict(answer) for answer in answers]), flush=True)


if __name__ == "__main__":
    main()
