"""How progress is shown: lines at steps of time and of percent, or a bar for each phase."""

from __future__ import annotations

import sys

from penstock.workers.progress import (
    DOWNLOADING,
    LOADING,
    WAITING,
    Progress,
    ProgressBar,
    ProgressLines,
    shown,
    size,
)

MIB = 1 << 20


def _lines(*states: tuple[float, Progress]) -> list[str]:
    """What is said of states at times in seconds."""
    said: list[str] = []
    times = iter([at_s for at_s, _ in states])
    lines = ProgressLines(said.append, lambda: next(times))  # one look at it for each state
    for _, state in states:
        lines(state)
    return said


def test_a_line_for_each_tenth_but_not_many_a_second():
    every = [(i / 10, Progress(DOWNLOADING, i * MIB, 400 * MIB)) for i in range(401)]
    said = _lines(*every)
    assert [line.split(" (")[0] for line in said] == [
        f"downloading {n} %" for n in range(10, 101, 10)
    ]
    assert said[4] == "downloading 50 % (200.0 MiB of 400.0 MiB), 10.0 MiB/s, 20 s left"
    fast = [(3 + i / 1000, Progress(DOWNLOADING, i * MIB, 400 * MIB)) for i in range(401)]
    assert _lines((0, Progress(DOWNLOADING, 0, 400 * MIB)), *fast) == [
        "downloading 10 % (40.0 MiB of 400.0 MiB), 13.2 MiB/s, 27 s left"
    ]


def test_a_line_after_ten_seconds_whatever_is_done():
    slow = [(float(i), Progress(DOWNLOADING, i, 10**9)) for i in range(31)]
    assert len(_lines(*slow)) == 3
    assert _lines(*[(float(i), Progress(WAITING)) for i in range(21)]) == [
        f"{WAITING}, for 10 s",
        f"{WAITING}, for 20 s",
    ]


def test_no_line_for_what_takes_a_moment():
    assert _lines(*[(i / 100, Progress(LOADING, i, 100)) for i in range(101)]) == []


def test_phases_are_measured_apart():
    said = _lines(
        (0, Progress(DOWNLOADING, 0, 100)),
        (20, Progress(DOWNLOADING, 100, 100)),
        (25, Progress(LOADING, 0, 100)),
        (36, Progress(LOADING, 50, 100)),
    )
    assert said == [
        "downloading 100 % (100 bytes of 100 bytes), 5 bytes/s, 0 s left",
        "loading weights 50 % (50 bytes of 100 bytes), 5 bytes/s, 11 s left",
    ]


def test_a_bar_for_each_phase_that_has_bytes(capfd):
    bar = ProgressBar()
    for state in (
        *(Progress(WAITING), Progress(DOWNLOADING, 0, 200), Progress(DOWNLOADING, 150, 200)),
        *(Progress(LOADING, 25, 100), Progress(LOADING, 75, 100)),
    ):
        bar(state)
    bar.close()
    err = capfd.readouterr().err
    assert WAITING not in err
    assert "downloading: 100%" in err and "200/200" in err
    assert err.rpartition("\r")[2].startswith("loading weights:  75%")


def test_a_bar_is_full_when_the_start_succeeds(capfd):
    for end, percent in ((ProgressBar.finish, 100), (ProgressBar.close, 40)):
        bar = ProgressBar()
        bar(Progress(LOADING, 40, 100))
        end(bar)
        last = capfd.readouterr().err.rpartition("\r")[2]
        assert last.startswith(f"loading weights: {percent:3}%")


def test_a_bar_on_a_terminal_only(monkeypatch):
    assert isinstance(shown(), ProgressLines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(shown(), ProgressBar)


def test_sizes():
    assert [size(each) for each in (0, 1023, MIB, 3 << 29)] == [
        *("0 bytes", "1023 bytes", "1.0 MiB", "1.5 GiB")
    ]
    assert Progress(LOADING, 5, 0).percent == 0
