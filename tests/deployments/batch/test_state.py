"""The state file: a run is resumed only as what it was."""

from __future__ import annotations

import pytest

from penstock.deployments.batch.state import Identity, RunState, StateError

IDENTITY = Identity("00ff", "builtin", 7)


def test_a_run_is_read_back(tmp_path):
    state = RunState(tmp_path / "state")
    assert (state.identity, state.finished) == (None, None)
    state.begin(IDENTITY)
    state.close()
    state = RunState(tmp_path / "state")
    assert (state.identity, state.finished) == (IDENTITY, None)
    state.finish(num_output=3)
    state.close()
    state = RunState(tmp_path / "state")
    assert (state.identity, state.finished) == (IDENTITY, {"num_output": 3})
    state.discard()
    state.close()
    assert RunState(tmp_path / "state").identity is None


@pytest.mark.parametrize("end", range(1, 200, 9))
def test_a_torn_last_line_was_never_written(tmp_path, end):
    path = tmp_path / "state"
    state = RunState(path)
    state.begin(IDENTITY)
    num_begun = path.stat().st_size
    state.finish(num_output=1)
    state.close()
    content = path.read_bytes()
    cut = min(end, len(content))
    path.write_bytes(content[:cut])
    state = RunState(path)
    assert state.identity == (IDENTITY if cut >= num_begun else None)
    assert state.finished == ({"num_output": 1} if cut == len(content) else None)
    state.close()


@pytest.mark.parametrize("content", [b"hello\n", b"[]\n", b'{"format": 1}\n', b'{"format": 2}\n'])
def test_another_file_is_not_taken_for_a_state(tmp_path, content):
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(StateError, match=r"state"):
        RunState(tmp_path / "state")
    assert (tmp_path / "state").read_bytes() == content


def test_the_difference_between_runs_is_named():
    assert IDENTITY.difference(IDENTITY) is None
    assert IDENTITY.difference(Identity("11", "builtin", 7)) == "another input (00ff; now 11)"
    assert IDENTITY.difference(Identity("00ff", "b", 7)) == "another model (builtin; now b)"
    assert IDENTITY.difference(Identity("00ff", "builtin", 8)) == "another seed (7; now 8)"
