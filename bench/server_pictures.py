"""Pictures of the server's web page for the docs, from a recording of a server that works.

PYTHONPATH=src:. python3 bench/server_pictures.py record runs/nano RECORDING.json --slots 8
PYTHONPATH=src:. python3 bench/server_pictures.py draw RECORDING.json docs

A machine with a GPU may have no browser: it records what the server answers, and another machine
shows these answers, at the same speed, to the page.
"""

import argparse
import http.client
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from tests.server.browser import Browser
from tests.server.mock_server import Mock, mock_server

SECONDS = 45
"""Seconds before the chat: the chart of the throughput shows them."""
_PROMPTS = ["class Config:", "import os", "def main():", "for line in"]


def post(address: str, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=120)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    return connection.getresponse()


def keep_busy(address: str, model: str, number: int, ended: threading.Event) -> None:
    """One client: answers and pauses of different lengths."""
    body = {"model": model, "prompt": _PROMPTS[number % len(_PROMPTS)], "temperature": 0.8}
    step = 0
    while not ended.is_set():
        step += 1
        length = 40 + 37 * (number + step) % 150
        post(address, "/v1/completions", {**body, "max_tokens": length, "seed": step}).read()
        ended.wait(0.3 * ((number + step) % 5))


def watch(address: str, stats: list[dict[str, Any]], ended: threading.Event) -> None:
    while not ended.wait(1):
        connection = http.client.HTTPConnection(urlsplit(address).netloc)
        connection.request("GET", "/stats")
        stats.append(json.loads(connection.getresponse().read()))
        connection.close()


def read_chat(address: str, model: str, prompts: list[str], tokens: int) -> list[dict[str, Any]]:
    """Questions, the pieces of their answers, and the seconds between pieces."""
    messages: list[dict[str, str]] = []
    turns: list[dict[str, Any]] = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        body = {
            "model": model, "messages": messages, "stream": True, "max_tokens": tokens,
            "temperature": 0.8, "seed": 3, "stream_options": {"include_usage": True},
        }  # fmt: skip
        pieces, usage, start = [], {}, time.perf_counter()
        for line in post(address, "/v1/chat/completions", body):
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                text = event["choices"][0]["delta"].get("content") if event["choices"] else None
                pieces += [text] if text else []
                usage = event.get("usage") or usage
        delay = (time.perf_counter() - start) / max(1, len(pieces))
        turn = {"prompt": prompt, "pieces": pieces, "delay": delay}
        turns.append({**turn, "prompt_tokens": usage["prompt_tokens"]})
        messages.append({"role": "assistant", "content": "".join(pieces)})
    return turns


def record(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "overspill", "serve", args.model, "--port", "0", "--json"]
    server = subprocess.Popen([*command, *args.flags], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        started = json.loads(server.stdout.readline())
        address, model = started["url"], started["model"]
        ended = threading.Event()
        stats: list[dict[str, Any]] = []
        threads = [threading.Thread(target=watch, args=(address, stats, ended))]
        for number in range(args.clients):
            asked = (address, model, number, ended)
            threads.append(threading.Thread(target=keep_busy, args=asked))
        for thread in threads:
            thread.start()
        time.sleep(args.seconds)
        turns = read_chat(address, model, args.prompt, args.tokens)
        ended.set()
        for thread in threads:
            thread.join()
    finally:
        server.terminate()
        server.wait(30)
    args.file.write_text(json.dumps({"after": args.seconds, "turns": turns, "stats": stats}))
    print("\n".join("".join(turn["pieces"]) for turn in turns))


def play(mock: Mock, stats: list[dict[str, Any]], ended: threading.Event) -> None:
    for each in stats:
        mock.stats = each
        if ended.wait(1):
            return


def draw(args: argparse.Namespace) -> None:
    recording = json.loads(args.file.read_text())
    ended = threading.Event()
    with TemporaryDirectory() as folder, mock_server() as mock, Browser(Path(folder)) as browser:
        mock.stats = recording["stats"][0]
        mock.model = recording["stats"][0]["model"]
        mock.context = recording["stats"][0]["context"]
        browser.resize(1280, 800)
        browser.prefer(prefers_color_scheme="light")
        browser.open(mock.address)
        threading.Thread(target=play, args=(mock, recording["stats"], ended)).start()
        if args.plain:
            browser.click("#show-settings")
            browser.click("#plain")  # the answer is code, not Markdown
            browser.click("#show-settings")
        time.sleep(recording["after"])
        for number, turn in enumerate(recording["turns"], 1):
            mock.pieces, mock.delay = turn["pieces"], turn["delay"]
            mock.prompt_tokens = turn["prompt_tokens"]
            browser.click("#prompt")
            browser.type(turn["prompt"])
            browser.press("Enter")
            done = "document.querySelectorAll('article.assistant .meta button').length"
            browser.wait_for(f"{done} === {number}", 120)
        browser.evaluate("document.activeElement.blur()")
        browser.screenshot(args.folder / "server-chat.png")
        browser.resize(360, 740, 2, mobile=True)
        time.sleep(1.5)
        browser.screenshot(args.folder / "server-phone.png")
        ended.set()
        assert browser.problems == [], browser.problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("record", help="other flags are those of overspill serve")
    one.add_argument("model")
    one.add_argument("file", type=Path)
    one.add_argument("--prompt", nargs="+", default=["def read_lines(path):"])
    one.add_argument("--tokens", type=int, default=200)
    one.add_argument("--clients", type=int, default=3)
    one.add_argument("--seconds", type=int, default=SECONDS)
    one.set_defaults(run=record)
    other = commands.add_parser("draw")
    other.add_argument("file", type=Path)
    other.add_argument("folder", type=Path)
    other.add_argument("--plain", action="store_true", help="the answer is no Markdown")
    other.set_defaults(run=draw)
    args, args.flags = parser.parse_known_args()
    args.run(args)


if __name__ == "__main__":
    main()
