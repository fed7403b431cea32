"""Settings of the store: what is refused names the setting and the remedy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.deployments.config import config_from
from penstock.deployments.options import StateOptions
from penstock.deployments.state.factory import open_store
from penstock.deployments.state.url import EmbeddedAddress, RedisAddress, parse
from penstock.workers.errors import ConfigError


@pytest.mark.parametrize("url", [None, ""])
def test_no_url_is_a_temporary_folder(url):
    assert parse(StateOptions(state_url=url)) == EmbeddedAddress(None)


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("sqlite:///var/lib/penstock", "/var/lib/penstock"),
        ("sqlite:////var/lib/penstock", "/var/lib/penstock"),
        ("sqlite:///with%20space/s", "/with space/s"),
    ],
)
def test_a_folder(url, folder):
    assert parse(StateOptions(state_url=url)) == EmbeddedAddress(Path(folder))


def test_redis():
    def address(url, **settings):
        return parse(StateOptions(state_url=url, **settings))

    assert address("redis://host") == RedisAddress("host", 6379, 0, "penstock:")
    assert address("redis://host:1/2", state_prefix="x:") == RedisAddress("host", 1, 2, "x:")
    secure = address(
        "rediss://me@[::1]:7/",
        state_password_file="p",
        state_ca_file="a",
        state_cert_file="c",
        state_key_file="k",
    )
    assert secure == RedisAddress("::1", 7, 0, "penstock:", True, "me", "p", "a", "c", "k")
    assert str(secure) == "rediss://[::1]:7/0"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"state_url": "redis://:secret@host/0"}, ["password", "state_password_file"]),
        ({"state_url": "redis://me:secret@host/0"}, ["password", "state_password_file"]),
        ({"state_url": "postgres://host/db"}, ["state_url", "sqlite:///FOLDER", "redis://"]),
        ({"state_url": "/var/lib/penstock"}, ["state_url", "sqlite:///FOLDER"]),
        ({"state_url": "sqlite://relative/folder"}, ["state_url", "absolute"]),
        ({"state_url": "sqlite:///"}, ["state_url", "absolute"]),
        ({"state_url": "redis:///0"}, ["state_url", "host"]),
        ({"state_url": "redis://host:port/0"}, ["state_url"]),
        ({"state_url": "redis://host:99999/0"}, ["state_url"]),
        ({"state_url": "redis://host/zero"}, ["state_url", "database"]),
        ({"state_url": "redis://host/0?timeout=1"}, ["state_url", "database"]),
        ({"state_url": "redis://me@host/0"}, ["user", "state_password_file"]),
        ({"state_url": "redis://host", "state_ca_file": "x"}, ["state_ca_file", "rediss://"]),
        ({"state_url": "rediss://host", "state_cert_file": "x"}, ["state_key_file", "both"]),
        ({"state_url": "redis://host", "state_prefix": "a b"}, ["state_prefix", "letters"]),
        ({"state_url": "redis://host", "state_prefix": ""}, ["state_prefix", "letters"]),
        ({"state_password_file": "x"}, ["state_password_file", "Redis"]),
    ],
)
def test_a_bad_setting_is_named_with_its_remedy(values, words):
    with pytest.raises(ConfigError) as error:
        config_from(values)
    for word in words:
        assert word in str(error.value)
    assert "secret" not in str(error.value)


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"state_url": "redis://host", "state_password_file": "password"}
    made = config_from(values).with_absolute_paths()
    assert made.state_password_file == str(tmp_path / "password")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state_password_file": "/nowhere"}, "state_password_file /nowhere cannot be read"),
        ({"state_password_file": "/dev/null"}, "no password"),
        ({"state_url": "rediss://127.0.0.1:1", "state_ca_file": "/dev/null"}, "state_ca_file"),
        ({"state_url": "rediss://127.0.0.1:1", "state_ca_file": "/nowhere"}, "state_ca_file"),
        (
            {
                "state_url": "rediss://127.0.0.1:1",
                "state_cert_file": "/dev/null",
                "state_key_file": "/dev/null",
            },
            "state_cert_file",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(settings, words):
    options = StateOptions(**{"state_url": "redis://127.0.0.1:1", **settings})
    with pytest.raises(ConfigError, match=words):
        asyncio.run(open_store(options))
