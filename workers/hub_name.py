"""Names of models of the hub: `org/name`, with a revision (`@v2`) or a GGUF file (`:x.gguf`).

A file may be named by its type (`:Q4_K_M`), as llama.cpp and vLLM do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from penstock.workers.errors import ConfigError

_REPO = r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?"
_NAME = re.compile(rf"({_REPO})(?:@([\w./-]+))?(?::([\w.+/ -]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub. `str` writes it without the revision, as `model` has it."""

    repo: str
    revision: str | None = None  # None: main
    file: str | None = None  # of GGUF, or its type; None: the repository is one checkpoint

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}:{self.file}"

    @property
    def has_commit(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def short(self) -> str:
        """A name for clients, where no other is configured."""
        if self.file is not None and self.file.endswith(".gguf"):
            return self.file.rsplit("/", 1)[-1].removesuffix(".gguf")
        return str(self).rsplit("/", 1)[-1]


def hub_name(model: str, revision: str | None = None) -> HubName | None:
    """The parts of a name; None if it is none of the hub. Whether there is a folder of that name is
    the caller's question.

    Raises ConfigError if the name has another revision than `revision`.
    """
    match = _NAME.fullmatch(model)
    if match is None:
        return None
    repo, own, file = match.groups()
    if own is not None and revision is not None and own != revision:
        raise ConfigError(
            f"model {model} names the revision {own}, and revision is {revision}: leave one out"
        )
    return HubName(repo, revision if own is None else own, file)


def check_revision(model: str, revision: str | None) -> None:
    """Raise ConfigError if the name of the model and `revision` contradict each other."""
    if revision is not None and not Path(model).expanduser().exists():
        hub_name(model, revision)
