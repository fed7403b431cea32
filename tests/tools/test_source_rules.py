"""`make check` finds what runs code of others, and asserts that check: each kind of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.find_asserts import checking_asserts, problems, sources

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    "import pickle\n": "TID251",
    "from pickle import loads\n": "TID251",
    "import cloudpickle\n": "TID251",
    "import marshal\n": "TID251",
    "import shelve\n": "TID251",
    "import torch\n\ntorch.load('x')\n": "TID251",
    "from torch import load\n": "TID251",
    "import numpy as np\n\nnp.load('x', allow_pickle=True)\n": "TID251",
    "import os\n\nos.popen('ls')\n": "TID251",
    "import subprocess\n\nsubprocess.getoutput('ls')\n": "TID251",
    "import pickle\n\npickle.loads(b'')\n": "S301",
    "import marshal\n\nmarshal.loads(b'')\n": "S302",
    "eval(input())\n": "S307",
    "exec(input())\n": "S102",
    "import yaml\n\nyaml.load('x', yaml.Loader)\n": "S506",
    "import subprocess\n\nsubprocess.run('ls', shell=True)\n": "S602",
    "import os\n\nos.system('ls ' + input())\n": "S605",
    "import tempfile\n\ntempfile.mktemp()\n": "S306",
    "import random\n\nkey = random.getrandbits(128)\n": "TID251",
    "import random\n\nkey = random.Random().choice('ab')\n": "S311",
    "import hashlib\n\nhashlib.md5(b'')\n": "S324",
    "import os\n\nos.chmod('x', 0o777)\n": "S103",
}


def codes_of(source: str, path: str) -> set[str]:
    command = [sys.executable, "-m", "ruff", "check", "--output-format=json"]
    command += ["--stdin-filename", path, "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    return {each["code"] for each in json.loads(done.stdout)}


@pytest.mark.parametrize("folder", ["deployments", "workers", "kernels"])
def test_ruff_finds_each_kind(folder):
    """In one run a folder: under a name that no exception covers."""
    source = "\n".join(CASES)
    assert set(CASES.values()) <= codes_of(source, f"{folder}/new_file.py")


@pytest.mark.parametrize("source", CASES)
def test_ruff_finds_each_by_itself(source):
    assert CASES[source] in codes_of(source, "deployments/new_file.py")


def test_ruff_accepts_the_safe_ways():
    source = (
        '"""Safe."""\n\nimport secrets\nimport subprocess\nimport tempfile\n\nimport yaml\n\n'
        'subprocess.run(["ls"], check=True)\nyaml.safe_load("x")\nsecrets.token_hex(16)\n'
        "tempfile.mkstemp()\n"
    )
    assert codes_of(source, "deployments/new_file.py") == set()


@pytest.mark.parametrize(
    "test",
    [
        *("x", "x > 1", "x == y", "len(x) == 2", "x is y", "x in y", "f(x)", "not x"),
        *("x is not None and x > 1", "isinstance(x, int) or y", "x is not None or y", "False"),
    ],
)
def test_an_assert_that_checks_is_found(test):
    source = f"def f(x, y):\n    if x:\n        assert {test}, 'why'\n"
    assert checking_asserts(source) == [3]
    assert problems([("workers/a.py", source)], {}) == [
        "workers/a.py:3: an assert that checks; raise an error"
    ]
    assert problems([("workers/a.py", source)], {"workers/a.py": "reason"}) == []


@pytest.mark.parametrize(
    "test",
    [
        "x is not None",
        "x is None",
        "isinstance(x, int)",
        "not callable(x)",
        "x is not None and y is not None",
    ],
)
def test_an_assert_for_the_type_checker_is_not(test):
    assert checking_asserts(f"assert {test}\n") == []


def test_a_listed_file_without_one_is_named():
    assert problems([("workers/a.py", "x = 1\n")], {"workers/a.py": "reason"}) == [
        "tools/find_asserts.py: workers/a.py has no such assert"
    ]


def test_this_tree_has_none():
    assert problems(sources()) == []
