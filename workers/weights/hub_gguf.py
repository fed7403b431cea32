"""GGUF files of the hub: which one a name means, and its header without its weights.

The tokenizer of such a model is in the header of its one file. An ingress that shares no disk with
a worker reads a few megabytes of it.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

from penstock.workers.errors import LoadError
from penstock.workers.gguf.header import SUFFIX, read_header_of
from penstock.workers.hub_name import HubName

PIECE_BYTES = 4 << 20  # in one request
HEADERS = "penstock-gguf-headers"  # folder in the cache
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def chosen_gguf(name: HubName, files: Iterable[str]) -> str:
    """The path of the file that `name.file` names, by its path or its type. Raises LoadError."""
    assert name.file is not None
    known = sorted(path for path in files if path.endswith(SUFFIX))
    if name.file in known:
        found = [name.file]
    else:
        # The type ends the file's name, perhaps followed by the number of a part.
        ending = re.compile(
            rf"(?:^|[-._/]){re.escape(name.file)}(?:-\d{{5}}-of-\d{{5}})?\.gguf$", re.IGNORECASE
        )
        found = [path for path in known if ending.search(path)]
    if len(found) == 1 and not _PART.search(found[0]):
        return found[0]
    if found and all(map(_PART.search, found)):
        raise LoadError(
            f"model {name}: {found[0]} is one of several parts, which Penstock does not read; name "
            "a file that is whole, or merge them with llama.cpp's llama-gguf-split"
        )
    if not known:
        raise LoadError(
            f"model {name}: the repository has no GGUF files; write {name.repo}, and --weights "
            "int4 or int8 to quantise while loading"
        )
    listed = ", ".join((found or known)[:12])
    what = f"{len(found)} files of that type" if found else "no such GGUF file"
    raise LoadError(f"model {name}: the repository has {what}; name one of its files: {listed}")


def header_copy(repo: str, commit: str, file: str, num_bytes: int, cache: Path) -> Path:
    """A file that holds the header of a GGUF file, and of the rest only its size.

    Kept in the cache; takes no room for the weights. Raises ConfigError for a header that Penstock
    cannot read, and what the hub's client raises.
    """
    path = cache / HEADERS / repo.replace("/", "--") / commit / file
    if path.is_file():
        return path
    remote = _RemoteFile(repo, commit, file, num_bytes)
    header = read_header_of(path, cast(BinaryIO, remote))
    ends = [each.offset for each in header.tensors.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as written:
        written.write(remote.read_so_far[: min(ends, default=num_bytes)])
        written.truncate(num_bytes)
    os.replace(written.name, path)
    return path


class _RemoteFile:
    """Reads a file of the hub from its start on, in pieces. As much of a file as a header needs."""

    def __init__(self, repo: str, commit: str, file: str, num_bytes: int):
        from huggingface_hub import hf_hub_url

        self._url = hf_hub_url(repo, file, revision=commit)
        self._size = num_bytes
        self._position = 0
        self.read_so_far = bytearray()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset if whence == os.SEEK_SET else self._size + offset
        return self._position

    def read(self, count: int) -> bytes:
        end = min(self._position + count, self._size)
        while len(self.read_so_far) < end:
            self.read_so_far += self._piece(len(self.read_so_far))
        raw = bytes(self.read_so_far[self._position : end])
        self._position = end
        return raw

    def _piece(self, start: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        end = min(start + PIECE_BYTES, self._size) - 1
        headers: dict[str, Any] = {
            **build_hf_headers(),
            "Range": f"bytes={start}-{end}",
            "Accept-Encoding": "identity",
        }
        asked = get_session().stream("GET", self._url, headers=headers, follow_redirects=True)
        with asked as response:
            hf_raise_for_status(response)
            if response.status_code != 206 and start:
                raise LoadError("the hub ignores the header Range: it sent the whole file")
            raw = bytearray()
            for chunk in response.iter_bytes():
                raw += chunk
                if len(raw) > end - start:
                    break
        if len(raw) <= end - start:
            raise ConnectionError(f"the hub sent {len(raw)} of {end - start + 1} bytes")
        return bytes(raw[: end - start + 1])
