"""Malformed requests, each made from a number."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PATHS = ("/v1/chat/completions", "/v1/completions")
_HOST = b"Host: localhost\r\n"
_JSON = b"Content-Type: application/json\r\n"
_LARGE = 80_000
"""More than the limits on bodies and headers that the fuzzed server has."""

_CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "n": 1,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^a+$", "maxLength": 4}},
                "required": ["a"],
            },
        },
    },
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
        }
    ],
    "tool_choice": "none",
    "chat_template_kwargs": {"shout": True},
    "user": "me",
}
_COMPLETION: dict[str, Any] = {
    "model": "tiny",
    "prompt": [[1, 2, 3], [4]],
    "max_tokens": 3,
    "temperature": 0,
    "logprobs": 2,
    "n": 2,
    "echo": False,
    "best_of": 2,
    "stop": "x",
    "stream": False,
    "suffix": None,
    "src_lang": None,
    "tgt_lang": None,
    "decoder_prompt": None,
}
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 5, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), "", "a", "\x00", "\ud800", "😀" * 50, "tiny", "a" * 3000, 5e-324,
    [], [[]], [None], [0], [-1], [10**9], ["a"], [["a"]], {}, {"": ""}, {"type": "text"},
    {"type": "object"}, {"$ref": "#"}, {"type": ["string", 5]}, {"pattern": "("}, {"anyOf": []},
    {"not": {}}, {"role": "user"}, {"name": "f"}, {"function": {"name": "f"}}, "auto", "required",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What a client sends, and how it ends."""

    kind: str
    parts: tuple[bytes, ...]
    pause: float = 0.0
    """Seconds between the parts."""
    end: str = "read"
    """"read" reads the answer, "half" also closes its own side, "close" and "reset" go away."""


def case_of(number: int) -> Case:
    draw = random.Random(number)
    made = draw.choice(_KINDS)(draw)
    end = made.end if draw.random() < 0.85 else draw.choice(("half", "close", "reset"))
    return Case(made.kind, made.parts, made.pause, end)


def _request(draw: random.Random, body: bytes, headers: bytes = b"") -> bytes:
    path = draw.choice(PATHS).encode()
    if draw.random() < 0.8:
        headers += b"Connection: close\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"POST " + path + b" HTTP/1.1\r\n" + _HOST + _JSON + headers + length + body


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    if not isinstance(value, dict | list):
        return []
    found = [(value, key) for key, _ in items]
    inner = value.values() if isinstance(value, dict) else value
    return found + [
        place for each in inner if isinstance(each, dict | list) for place in _places(each)
    ]


def _mutated(draw: random.Random) -> Any:
    body = json.loads(json.dumps(draw.choice((_CHAT, _COMPLETION))))
    needed = [name for name in ("messages", "prompt") if name in body]
    for name in draw.sample(list(body), draw.randint(0, len(body))):  # so that some are alone
        if name not in needed or draw.random() < 0.02:
            del body[name]
    if "stream" not in body:
        body.pop("stream_options", None)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(body)
        if not places:
            break
        container, key = draw.choice(places)
        action = draw.random()
        if action < 0.7:
            container[key] = copy.deepcopy(draw.choice(_VALUES))
        elif action < 0.85:
            del container[key]
        elif isinstance(container, list):
            container.extend([copy.deepcopy(container[key])] * draw.randint(1, 50))
        else:
            name = draw.choice(("", "x", "type", "content", "$defs"))
            container[name] = copy.deepcopy(container[key])
    body.setdefault("max_tokens", 3)
    return body


def _wrong_types(draw: random.Random) -> Case:
    text = json.dumps(_mutated(draw), ensure_ascii=draw.random() < 0.5)
    return Case("wrong types", (_request(draw, text.encode("utf-8", "surrogatepass")),))


def _wrong_bytes(draw: random.Random) -> Case:
    """JSON with bytes that were changed, put in or cut out: often invalid UTF-8."""
    body = bytearray(json.dumps(_mutated(draw)).encode())
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(len(body) + 1)
        body[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
    return Case("wrong bytes", (_request(draw, bytes(body)),))


def _nested(draw: random.Random) -> Case:
    depth, pair = draw.choice((100, 1000, 10_000)), draw.choice(("[]", '{"a":|}'))
    begin, end = (pair[:-1].rstrip("|"), pair[-1])
    value = begin * depth + "1" * ("{" in begin) + end * depth
    field = draw.choice(("messages", "prompt", "response_format", "tools", "logit_bias", "x"))
    body = f'{{"prompt":"a","max_tokens":2,"{field}":{value}}}'.encode()
    return Case("nested", (_request(draw, body),))


def _truncated(draw: random.Random) -> Case:
    whole = _request(draw, json.dumps(draw.choice((_CHAT, _COMPLETION))).encode())
    cut = whole[: draw.randrange(1, len(whole))]
    return Case("truncated", (cut,), end=draw.choice(("half", "close", "reset")))


def _slow(draw: random.Random) -> Case:
    """Sent in a few parts; a few of them never complete."""
    whole = _request(draw, json.dumps(draw.choice((_CHAT, _COMPLETION))).encode())
    cuts = sorted(draw.sample(range(1, len(whole)), 3))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    complete = draw.random() < 0.7
    return Case("slow", tuple(parts if complete else parts[:2]), draw.choice((0.01, 0.1, 0.4)))


def _oversized(draw: random.Random) -> Case:
    large = b"a" * draw.choice((_LARGE, 10 * _LARGE))
    chunk = b"%x\r\n%s\r\n" % (len(large), large)
    made = (
        _request(draw, b'{"prompt":"' + large + b'"}'),
        _request(draw, b"{}", b"X-Large: " + large + b"\r\n"),
        b"POST /" + large + b" HTTP/1.1\r\n" + _HOST + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\n"
        + _HOST
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + chunk,
        b"GET /stats HTTP/1.1\r\n" + _HOST + b"X: y\r\n" * 20_000 + b"\r\n",
    )
    return Case("oversized", (draw.choice(made),))


def _not_http(draw: random.Random) -> Case:
    made = (
        draw.randbytes(draw.randint(1, 300)),
        b"\r\n" * draw.randint(1, 50) + b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/%d.%d\r\n%s\r\n" % (draw.randint(0, 9), draw.randint(0, 9), _HOST),
        b"GET /\r\n\r\n",
        b"GET  HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + draw.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + _HOST + b"Bad Header\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + _HOST + _HOST + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + _HOST + b"X: a\x00b\r\n\r\n",
    )
    return Case("not HTTP", (draw.choice(made),))


def _wrong_framing(draw: random.Random) -> Case:
    body = json.dumps(_COMPLETION).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n" + _HOST + _JSON
    chunked = head + b"Transfer-Encoding: chunked\r\n"
    made = (
        head + b"Content-Length: -1\r\n\r\n" + body,
        head + b"Content-Length: 1e3\r\n\r\n" + body,
        head + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n" + body,
        head + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n" + body,
        head + b"Content-Length: 3\r\n\r\n" + body,  # the rest is the next request
        head + b"\r\n" + body,
        chunked + b"\r\nzz\r\n" + body,
        chunked + b"\r\n-5\r\n" + body,
        chunked + b"\r\nffffffffffffffff\r\n" + body,
        chunked + b"Content-Length: 4\r\n\r\n0\r\n\r\n",
        chunked + b"\r\n%x;ext=1\r\n%s\r\n0\r\nTrailer: x\r\n\r\n" % (len(body), body),
        head + b"Transfer-Encoding: gzip\r\n\r\n" + body,
        head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
        head + b"Expect: 100-continue\r\nContent-Length: 900\r\n\r\n",
        head + b"Expect: nonsense\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body),
    )
    return Case("wrong framing", (draw.choice(made),))


def _wrong_path(draw: random.Random) -> Case:
    methods = (b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT", b"X")
    paths = (
        b"/", b"/v1", b"/v1/models/", b"/v1/models/../../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd",
        b"//evil/", b"/v1/models/%00", b"/v1/models/%ff%fe", b"/v1/completions/", b"*", b"/?" * 500,
        b"http://localhost/stats", b"/stats?" + b"a=b&" * 100, b"/metrics", b"/v1/chat/completions",
    )  # fmt: skip
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n"
    extra = draw.choice((b"", b"", upgrade, b"Origin: null\r\n", b"Authorization: \xff\r\n"))
    line = draw.choice(methods) + b" " + draw.choice(paths) + b" HTTP/1.1\r\n"
    return Case("wrong path", (line + _HOST + extra + b"\r\n",))


def _pipelined(draw: random.Random) -> Case:
    made = [_wrong_types(draw).parts[0] for _ in range(draw.randint(2, 4))]
    return Case("pipelined", (b"".join(made),))


def _gone(draw: random.Random) -> Case:
    """Valid, but nobody waits for the answer."""
    body = {"prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "n": draw.randint(1, 4)}
    text = json.dumps({**body, "stream": draw.random() < 0.5}).encode()
    end, pause = draw.choice(("half", "close", "reset")), draw.choice((0.0, 0.02))
    return Case("gone", (_request(draw, text), b""), pause, end)


_KINDS: tuple[Callable[[random.Random], Case], ...] = (
    *[_wrong_types] * 8, *[_wrong_bytes] * 4, _nested, *[_truncated] * 2, _slow, _oversized,
    *[_not_http] * 2, *[_wrong_framing] * 2, *[_wrong_path] * 2, _pipelined, _gone,
)  # fmt: skip
