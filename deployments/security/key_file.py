"""The file of keys (the setting `api_keys_file`): read with its checks, and changed as a whole.

One key a line; blank lines and lines that begin with '#' say nothing. A change writes a new file
and renames it over the old one, so that no reader ever sees half of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.deployments.security.records import DIGEST_PREFIX, KeyRecord, record_from
from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.security")

MAX_BYTES = 16 << 20


def read_key_file(path: str) -> tuple[KeyRecord, ...]:
    """The keys of a file. Raises ConfigError that names the line and the field.

    Also for a file without a key, and for one that every user may write.
    """
    text, mode = _text_of(path)
    records = parse_key_file(text, f"api_keys_file {path}")
    if not records:
        raise ConfigError(
            f"api_keys_file {path} has no key; `penstock keys add --file {path} --tenant NAME` "
            "makes one"
        )
    if mode & stat.S_IWOTH:
        raise ConfigError(f"api_keys_file {path} can be written by every user: chmod o-w {path}")
    has_clear_keys = any(not line.startswith((DIGEST_PREFIX, "{")) for _, line in _lines(text))
    if mode & stat.S_IROTH and has_clear_keys:
        log.warning(
            "api_keys_file %s can be read by every user of this machine: chmod o-r, or keep "
            "digests of the keys there (`penstock keys add`, or 'sha256:' and the digest)",
            path,
        )
    return records


def parse_key_file(text: str, name: str) -> tuple[KeyRecord, ...]:
    """The keys in the text of a file. `name`: of the file, for errors. Raises ConfigError."""
    records: list[KeyRecord] = []
    line_of: dict[str, int] = {}
    for number, line in _lines(text):
        try:
            record = record_from(line)
        except ConfigError as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
        if not record.is_bare and record.key_id in line_of:
            raise ConfigError(
                f"{name}, line {number}: field 'id' must be unique, and line "
                f"{line_of[record.key_id]} has {record.key_id}, too"
            )
        line_of[record.key_id] = number
        records.append(record)
    return tuple(records)


def read_client_key(path: str) -> str:
    """The key of a client: the first line of a file that is no comment. Raises ConfigError."""
    text, _ = _text_of(path, "--api-key-file")
    line = next((line for _, line in _lines(text)), None)
    if line is None:
        raise ConfigError(f"--api-key-file {path} has no key; write the key into its first line")
    if line.startswith(("{", DIGEST_PREFIX)):
        raise ConfigError(
            f"--api-key-file {path} holds records of keys, as a server has them; a client needs "
            "the key itself, as `penstock keys add` printed it"
        )
    return line


def change_key_file(path: str, change: Callable[[list[str]], Sequence[str]]) -> None:
    """Replace the lines of a file by what `change` makes of them; the file may be new.

    Readable by its owner only, or as it was if it is there. Two changes at once follow each other.
    Raises ConfigError, and OSError where the folder cannot be written.
    """
    file = Path(os.path.realpath(os.path.expanduser(path)))  # a link stays one
    with _locked(file):
        old, mode = _text_of(str(file)) if file.exists() else ("", 0o600)
        parse_key_file(old, f"api_keys_file {path}")
        text = "".join(f"{line}\n" for line in change(old.splitlines()))
        parse_key_file(text, f"api_keys_file {path}")
        _replace(file, text, stat.S_IMODE(mode) & ~stat.S_IRWXO)


def _replace(file: Path, text: str, mode: int) -> None:
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # 0600
    try:
        with open(number, "w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fchmod(new.fileno(), mode)
            if file.exists():
                owner = file.stat()
                with contextlib.suppress(PermissionError):  # root changes the service's file
                    os.fchown(new.fileno(), owner.st_uid, owner.st_gid)
            os.fsync(new.fileno())
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """By the folder, which is there also while the file is not, and which no rename replaces."""
    try:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot open the folder {file.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line.strip()


def _text_of(path: str, setting: str = "api_keys_file") -> tuple[str, int]:
    """The text of a file and its mode."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size > MAX_BYTES:
                raise ConfigError(f"{setting} {path} exceeds {MAX_BYTES >> 20} MiB")
            return file.read(MAX_BYTES).decode(), status.st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read {setting} {path}: {why}") from error
