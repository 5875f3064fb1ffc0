"""Sends malformed requests, and reads what the server answers."""

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.server.malformed import Case, case_of

_SECONDS = 60.0


@dataclass
class Outcome:
    """What many requests gave."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """With the number of the request, which makes it again."""


async def send_all(port: int, numbers: Sequence[int], clients: int) -> Outcome:
    """Sends the requests with these numbers, several at a time."""
    outcome, left = Outcome(), iter(numbers)

    async def client() -> None:
        for number in left:
            await _send(port, number, outcome)

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcome


async def _send(port: int, number: int, outcome: Outcome) -> None:
    case = case_of(number)
    outcome.kinds[case.kind] += 1
    try:
        async with asyncio.timeout(_SECONDS):
            answer = await _exchange(port, case)
    except TimeoutError:
        outcome.problems.append(f"{number} ({case.kind}): no end after {_SECONDS:g} s")
        return
    statuses = [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]
    outcome.statuses.update(statuses)
    for status in statuses:
        if status >= 500 and not _is_streamed(answer):
            outcome.problems.append(f"{number} ({case.kind}): status {status}")
    problem = _wrong_error(answer) if len(statuses) == 1 else None
    if problem is not None:
        outcome.problems.append(f"{number} ({case.kind}): {problem}")


def _is_streamed(answer: bytes) -> bool:
    """Whether what looks like a status line may be the text of a model."""
    return answer.startswith(b"HTTP/1.1 200 ") and b"\ndata: " in answer


def _wrong_error(answer: bytes) -> str | None:
    """What is wrong with an answer that should be an error of OpenAI's API."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head[9:12])
    if status < 400:
        return "an error within a stream" if b'"code":"server_error"' in body else None
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        whole = re.search(rb"content-length: (\d+)", head)
        cut = whole is not None and len(body) < int(whole[1])  # also of HEAD
        return None if cut else f"status {status} without an error body"
    return None if set(error) == {"message", "type", "param", "code"} else "another error body"


async def _exchange(port: int, case: Case) -> bytes:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    answer = b""
    try:
        for number, part in enumerate(case.parts):
            if number:
                await asyncio.sleep(case.pause)
            writer.write(part)
            await writer.drain()
        if case.end == "half":
            writer.write_eof()
        if case.end in ("read", "half"):
            answer = await _read(reader)
    except OSError:
        pass  # the server has closed the connection
    finally:
        if case.end == "reset":
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    return answer


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Until the server has nothing more to say: it keeps good connections open."""
    answer = b""
    with contextlib.suppress(OSError):
        while part := await asyncio.wait_for(_part(reader, bool(answer)), _SECONDS):
            answer += part
    return answer


async def _part(reader: asyncio.StreamReader, begun: bool) -> bytes:
    if not begun:
        return await reader.read(1 << 16)
    try:
        return await asyncio.wait_for(reader.read(1 << 16), 0.3)
    except TimeoutError:
        return b""
