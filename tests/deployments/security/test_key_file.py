"""The file of keys: changed as a whole, followed while the server runs, never half believed."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.key_file import (
    change_key_file,
    read_client_key,
    read_key_file,
)
from penstock.deployments.security.records import KeyRecord
from penstock.deployments.security.watch import KeyFileWatch
from penstock.workers.errors import ConfigError
from tests.deployments.security.keys import key_of


def add(path: Path, *lines: str) -> None:
    change_key_file(str(path), lambda old: [*old, *lines])


def test_a_new_file_is_for_its_owner_only_and_comments_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    _, record = key_of()
    add(file, "# ours", record.as_line())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    _, other = key_of("other")
    file.chmod(0o644)
    add(file, other.as_line())
    assert stat.S_IMODE(file.stat().st_mode) == 0o640  # never for others
    assert file.read_text().startswith("# ours\n")
    assert read_key_file(str(file)) == (record, other)
    assert os.listdir(tmp_path) == ["keys"]


def test_a_change_that_makes_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add(file, "bare")
    before = file.stat()
    with pytest.raises(ConfigError, match="line 2"):
        add(file, "{")
    assert file.stat() == before and os.listdir(tmp_path) == ["keys"]
    file.write_text("{\n")
    with pytest.raises(ConfigError, match="line 1"):
        add(file, "bare")
    with pytest.raises(ConfigError, match="cannot open the folder"):
        add(tmp_path / "nowhere" / "keys", "bare")


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    add(real, "bare")
    link.symlink_to(real)
    add(link, "second")
    assert link.is_symlink() and real.read_text() == "bare\nsecond\n"


def test_changes_at_once_are_all_made(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    threads = [threading.Thread(target=add, args=(file, f"bare-{n}")) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(file.read_text().split()) == sorted(f"bare-{n}" for n in range(12))


def test_the_key_of_a_client(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("# mine\nsecret\n")
    assert read_client_key(str(file)) == "secret"
    _, record = key_of()
    for line in (record.as_line(), "sha256:" + "0" * 64):
        file.write_text(line)
        with pytest.raises(ConfigError, match="a client needs the key itself"):
            read_client_key(str(file))
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_client_key(str(file))


def test_the_watch_takes_good_files_and_keeps_the_last_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    (first, one), (second, two) = key_of(), key_of("other")
    add(file, one.as_line())
    keys, num_looks = ApiKeys(read_key_file(str(file))), 0

    def on_look() -> None:
        nonlocal num_looks
        num_looks += 1

    watch = KeyFileWatch(keys, str(file), on_look)
    caplog.set_level("INFO", "penstock.security")

    def look() -> tuple[KeyRecord, ...]:
        asyncio.run(watch.look())
        return keys.records

    assert look() == (one,) and not caplog.messages
    add(file, two.as_line())
    assert look() == (one, two) and "was read again: 2 keys" in caplog.messages[-1]
    for bad in ("{\n", ""):
        file.write_text(bad)
        num_before = len(caplog.messages)
        look()
        look()  # it complains once
        assert len(caplog.messages) == num_before + 1
        assert "the last good keys stay in force" in caplog.messages[-1]
        assert keys.caller(f"Bearer {first}").tenant == "acme"
    file.unlink()
    assert look() == (one, two)
    revoked = replace(two, revoked=1.0)
    file.write_text(f"{one.as_line()}\n{revoked.as_line()}\n")
    assert look() == (one, revoked)
    assert num_looks == 8
    assert keys.caller(f"Bearer {first}").key_id == one.key_id and second


def test_the_watch_refuses_what_the_server_cannot_serve(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    (_, one), (_, two) = key_of(), key_of("other")
    add(file, one.as_line())
    keys = ApiKeys(read_key_file(str(file)))

    def check(records: object) -> None:
        raise ConfigError("not these")

    add(file, two.as_line())
    asyncio.run(KeyFileWatch(keys, str(file), lambda: None, check=check).look())
    assert keys.records == (one,)
