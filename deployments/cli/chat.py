"""`penstock chat`: a conversation in the terminal; answers are printed while they are generated.

The server is reached through cli/server.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from penstock.deployments.cli.server import Message, Server, ServerError

HELP = """\
Type a message, and Enter. Ctrl-C stops an answer; Ctrl-D or /quit ends the conversation.
  /reset         start a new conversation
  /system TEXT   set the system prompt, and start anew; without TEXT: none
  /help          show this text
  /quit          end"""


class ChatRepl:
    """One conversation: `system` if there is any, then turns of user and assistant."""

    def __init__(self, server: Server, sampling: dict[str, Any], system: str | None = None):
        self._server = server
        self._sampling = sampling
        self._system = system
        self._turns: list[Message] = []
        self._has_failed = False

    def run(self) -> int:
        """Run until the user ends it; the exit status: 1 if a script's message got no answer."""
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):  # absent from some Pythons
                import readline  # noqa: F401  (gives `input` line editing and history)
            print(f"Chatting with {', '.join(self._server.models())}. /help lists the commands.")
        for line in _lines("> " if is_terminal else ""):
            if line.startswith("/"):
                if not self._command(line):
                    break
            elif line:
                self._answer(line)
        return int(self._has_failed and not is_terminal)

    def answer_one(self, text: str) -> int:
        """Answer this message alone; the exit status: 1 if it got no answer."""
        self._answer(text)
        return int(self._has_failed)

    def _command(self, line: str) -> bool:
        """Run a line that begins with a slash; False ends the conversation."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self._turns.clear()
        elif name == "/system":
            self._system = rest.strip() or None
            self._turns.clear()
        elif name == "/help":
            print(HELP)
        else:
            print(f"{name} is no command; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        """Send `text`, print the answer while it arrives, and keep both as context."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        turn = {"role": "user", "content": text}
        pieces: list[str] = []
        stream = self._server.chat([*system, *self._turns, turn], self._sampling)
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except ServerError as error:
            print(f"\nerror: {error}" if pieces else f"error: {error}", flush=True)
            self._has_failed = True
            return
        finally:
            closing = getattr(stream, "close", None)
            if closing is not None:
                closing()
        print()
        self._turns += [turn, {"role": "assistant", "content": "".join(pieces)}]


def _lines(prompt: str) -> Iterator[str]:
    """What the user types, until Ctrl-D, or Ctrl-C at the prompt."""
    while True:
        try:
            yield input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
