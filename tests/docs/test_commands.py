"""Every `penstock` command that a page shows is one: the command line itself reads it."""

from __future__ import annotations

import argparse
import contextlib
import io

import click
import pytest
import yaml

from penstock.deployments.cli.flags.serve import settings_given
from penstock.deployments.cli.main import build_parser
from penstock.deployments.config import config_from
from penstock.workers.errors import ConfigError
from tests.docs.pages import (
    Block,
    all_blocks,
    command_in,
    commands,
    inline_commands,
    ray_job_commands,
)

PARSER = build_parser()
# Words that stand for a value, where a setting takes only some.
VALUES = {"FORMAT": "int8", "N": "2", "HOST:PORT": "head:6379"}
SHORT = ("the following arguments are required", "expected one argument")
SETTINGS_FILES = ("model", "models", "http_port", "http-port", "port")  # keys of such a file


def parsed(words: list[str]) -> argparse.Namespace | None:
    """None where the command prints its help. Raises ConfigError."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return PARSER.parse_args([VALUES.get(word, word) for word in words])
    except SystemExit:  # of --help and --version; what is wrong is a ConfigError
        return None


def problem_of(words: list[str], is_part: bool = False) -> str:
    """What is wrong with a command, or "". `is_part`: arguments and values may be left out."""
    try:
        args = parsed(words)
        if words[0] == "serve" and args is not None and not args.config:
            config_from(settings_given(args))
    except ConfigError as error:
        return "" if is_part and any(each in str(error) for each in SHORT) else str(error)
    return ""


def test_the_commands_of_all_blocks():
    found = commands()
    assert len(found) > 50
    wrong = [(where, words, why) for where, words in found if (why := problem_of(words))]
    assert not wrong


def test_the_commands_within_the_text():
    found = inline_commands()
    assert len(found) > 50
    wrong = [(where, why) for where, words in found if (why := problem_of(words, is_part=True))]
    assert not wrong


@pytest.mark.parametrize(
    "line",
    [
        "penstock serve --num-wokers 2",
        "$ penstock srve builtin",
        "penstock serve MODEL --weights int5     what it does",
        "ray job submit -- penstock batch in.jsonl out.jsonl --uri http://x",
        "source <(penstock completion csh)",
        "penstock serve --num-workers 4:1",
    ],
)
def test_a_wrong_command_is_found(line):
    words = command_in(line)
    assert words is not None
    assert problem_of(words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("    penstock chat          # a conversation", ["chat"]),
        ("penstock serve M --kv int8      what: it does", ["serve", "M", "--kv", "int8"]),
        ('penstock complete "It was"', ["complete", "It was"]),
        ("penstock keys list --file k > out", ["keys", "list", "--file", "k"]),
        ("useradd --system penstock", None),
        ("user penstock on resetchannels", None),
        ("chown penstock /etc/penstock", None),
        ("penstock: in.jsonl cannot be run", None),
    ],
)
def test_a_command_is_cut_from_its_line(line, words):
    assert command_in(line) == words


def settings_blocks() -> list[Block]:
    return [
        block
        for block in all_blocks("yaml")
        if isinstance(read := yaml.safe_load(block.text), dict)
        and read.keys() & {*SETTINGS_FILES}
        and "schema" not in read  # of another program
    ]


def test_the_files_of_settings(tmp_path):
    """As `--config` reads them."""
    blocks = settings_blocks()
    assert len(blocks) >= 2
    for block in blocks:
        file = tmp_path / "penstock.yaml"
        file.write_text(block.text)
        args = PARSER.parse_args(["serve", "--config", str(file)])
        config_from(settings_given(args))


def ray_job_problem(words: list[str]) -> str:
    """What Ray's own command line says against `ray job WORDS`, or ""."""
    from ray.dashboard.modules.job.cli import job_cli_group  # takes seconds

    command = job_cli_group.commands.get(words[0])
    if command is None:
        return f"no command {words[0]}"
    try:
        command.make_parser(click.Context(command)).parse_args(words[1:])
    except click.UsageError as error:
        return error.message
    return ""


def test_the_commands_for_jobs_are_those_of_ray():
    found = ray_job_commands()
    assert {words[0] for _, words in found} >= {"submit", "status", "logs", "stop"}
    assert not [(where, why) for where, words in found if (why := ray_job_problem(words))]
    assert ray_job_problem(["submit", "--num-cpu", "1"])
    assert ray_job_problem(["tail"])
