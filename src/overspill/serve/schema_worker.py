"""The program of the process that compiles JSON schemas within limits; `SchemaProcess` starts it.

It has one thread, and forks for each schema: a child can be ended at any time, and its limits count
nothing but its own schema. It imports no other module of this package, so that it starts quickly.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from typing import Any

LENGTH = struct.Struct("<Q")
SPACE = r"[ ]|\n[ \t]{0,16}"
"""White space between the parts of JSON. Without a limit a weak model may never end it."""
ENDED = b"\n"
"""Separates the answer of a child from its exit code. JSON in one line has no line break."""
_NICE = 5
"""Lowers the priority of schemas below that of answers that run."""
_QUICK_SECONDS = 0.2
_NICE_LATER = 10
"""Lowers the priority again after `_QUICK_SECONDS`, so that quick schemas come before others."""
_STACK = 1 << 20
"""Bytes of the stack for compiling. Threads that compile the same schema again have more: a schema
that is nested too deeply ends a child, not the process that serves."""


class _Bytes:
    """The smallest vocabulary. Compiling takes as long as with a large one."""

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"\xff<end>"]
        self.special_token_ids = [256]
        self.eos_token_id = 256
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Worker:
    """Child processes that compile, one for each connection."""

    def __init__(self, control: socket.socket, seconds: int, memory: int) -> None:
        """`control` receives connections. A child may use `seconds` of the CPU and `memory`
        bytes."""
        self._control = control
        self._limits = seconds, memory
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by a pipe that ends with them
        self._clients: dict[int, int] = {}  # connections to children

    def run(self) -> None:
        """Serve connections until the other process closes `control`, or has ended."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in ready:
                if descriptor in self._clients:  # it hung up: no client waits for the result
                    self._poll.unregister(descriptor)
                    os.kill(self._clients.pop(descriptor), signal.SIGKILL)
            for descriptor in ready:
                if descriptor in self._children:
                    self._reap(descriptor)
            # last: new descriptors may have the numbers of those that were closed
            if self._control.fileno() in ready and not self._accept():
                for child, _ in self._children.values():
                    os.kill(child, signal.SIGKILL)
                return

    def _accept(self) -> bool:
        """Start the child of the next connection; return False if no more follow."""
        _, descriptors, *_ = socket.recv_fds(self._control, 1, 1)
        if not descriptors:
            return False
        client = socket.socket(fileno=descriptors[0])
        try:
            ends, alive = os.pipe()
            child = os.fork()
        except OSError:  # a limit of this machine: the others go on
            client.close()
            return True
        if child == 0:
            self._control.close()  # whoever has it must see at once when this process ends
            for _, other in self._children.values():
                other.close()
            _compile_and_exit(client, *self._limits)
        os.close(alive)
        self._children[ends] = child, client
        self._clients[client.fileno()] = child
        self._poll.register(ends, select.POLLIN)
        self._poll.register(client, 0)  # POLLHUP and errors only
        return True

    def _reap(self, ends: int) -> None:
        """Send the exit code of a child to its client."""
        child, client = self._children.pop(ends)
        self._poll.unregister(ends)
        os.close(ends)
        if self._clients.pop(client.fileno(), None) is not None:
            self._poll.unregister(client)
        _, status = os.waitpid(child, 0)
        with client, contextlib.suppress(OSError):
            client.sendall(ENDED + b"%d" % os.waitstatus_to_exitcode(status))
            client.shutdown(socket.SHUT_RDWR)  # children that were forked later have it, too


def _compile_and_exit(client: socket.socket, seconds: int, memory: int) -> None:
    """Compile the schema of a connection, in a child process."""
    code = 1
    try:
        schema = receive(client)
        _limit(seconds, memory)
        results: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: results.append(compile_schema(schema)))
        thread.start()
        thread.join(_QUICK_SECONDS)
        if thread.is_alive() and thread.native_id is not None:
            nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICE_LATER
            os.setpriority(os.PRIO_PROCESS, thread.native_id, min(nice, 19))
        thread.join()
        client.sendall(json.dumps(results[0]).encode())
        code = 0
    finally:
        os._exit(code)


def _limit(seconds: int, memory: int) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    threading.stack_size(_STACK)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def compile_schema(schema: str) -> dict[str, Any]:
    """Return the grammar of a schema as llguidance's text, or the problem that prevents it."""
    import llguidance

    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_pattern": SPACE}
        )
    except ValueError as error:
        return {"problem": str(error)}
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return {"problem": matcher.get_error()}
    return {"grammar": grammar}


def receive(connection: socket.socket) -> str:
    """Receive a text from `send`."""
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return _read(connection, length).decode()


def send(connection: socket.socket, text: str) -> None:
    content = text.encode()
    connection.sendall(LENGTH.pack(len(content)) + content)


def _read(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        part = connection.recv(count - len(content))
        if not part:
            raise EOFError
        content += part
    return content


def main() -> None:
    import llguidance  # noqa: F401 - once, for all children

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that serves
    descriptor, seconds, memory = (int(word) for word in sys.argv[1:])
    os.nice(_NICE)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # the library tells there what its children lack
    Worker(socket.socket(fileno=descriptor), seconds, memory).run()


if __name__ == "__main__":
    main()
