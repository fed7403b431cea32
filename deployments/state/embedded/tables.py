"""The tables of an embedded store, and the SQL of each verb.

Two files: `values.db` is on disk before a put returns, and survives a power cut; `streams.db`,
with the token buckets, survives the end of the process, and loses its last commits with the power
(docs/operations/state.md). What changes something runs inside a transaction of writer.py, and
checks before it writes: an exception leaves the transaction as it was.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.deployments.state import rules
from penstock.deployments.state.store import ANY, Bucket, Expect, Slice, Taken, Versioned
from penstock.workers.errors import ConfigError

VERSION = 1
OLDEST = (3, 35, 0)  # RETURNING
SWEEP_ROWS = 500  # in one turn
VALUES_SQL = """
CREATE TABLE value (name TEXT PRIMARY KEY, body BLOB, version INTEGER, expires REAL);
CREATE INDEX value_expires ON value (expires) WHERE expires IS NOT NULL;
"""
STREAMS_SQL = """
CREATE TABLE stream (
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, next INTEGER, fence INTEGER, expires REAL
);
CREATE INDEX stream_expires ON stream (expires) WHERE expires IS NOT NULL;
CREATE TABLE record (stream INTEGER, n INTEGER, body BLOB, PRIMARY KEY (stream, n)) WITHOUT ROWID;
CREATE TABLE gone (stream INTEGER PRIMARY KEY);  -- its records are removed in turns
CREATE TABLE bucket (name TEXT PRIMARY KEY, level REAL, at REAL, expires REAL) WITHOUT ROWID;
CREATE INDEX bucket_expires ON bucket (expires) WHERE expires IS NOT NULL;
"""


@dataclass(frozen=True, slots=True)
class Database:
    """One file. synchronous: FULL or NORMAL, as SQLite means them in WAL mode."""

    path: Path
    schema: str
    synchronous: str


def connect_writer(database: Database) -> sqlite3.Connection:
    """The connection that writes and checkpoints; there is one for a file. Raises ConfigError."""
    if sqlite3.sqlite_version_info < OLDEST:
        raise ConfigError(
            f"state_url: SQLite {sqlite3.sqlite_version} is too old, 3.35 is needed; use a newer "
            "Python, or Redis"
        )
    try:
        db = sqlite3.connect(database.path, isolation_level=None, check_same_thread=False)
        if db.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
            raise ConfigError(f"state_url: {database.path} cannot have a write-ahead log")
        db.execute(f"PRAGMA synchronous={database.synchronous}")
        db.execute("PRAGMA wal_autocheckpoint=0")  # writer.py does it between commits
        db.execute("PRAGMA mmap_size=0")
        db.execute("PRAGMA cell_size_check=ON")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(
                f"BEGIN IMMEDIATE;{database.schema}PRAGMA user_version={VERSION};COMMIT;"
            )
        elif version != VERSION:
            raise ConfigError(
                f"state_url: {database.path} has version {version}, and this Penstock reads "
                f"{VERSION}; choose another folder"
            )
    except sqlite3.Error as error:
        raise ConfigError(
            f"state_url: {database.path} cannot be used ({error}); is the disk full, or the file "
            "damaged? Move the folder away, or choose another"
        ) from error
    return db


def connect_reader(database: Database) -> sqlite3.Connection:
    """It can neither write nor checkpoint."""
    uri = f"{database.path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def get(db: sqlite3.Connection, name: str, now_s: float) -> Versioned | None:
    row = db.execute(
        "SELECT body, version FROM value WHERE name=? AND (expires IS NULL OR expires>?)",
        (name, now_s),
    ).fetchone()
    return None if row is None else Versioned(*row)


def put(
    db: sqlite3.Connection,
    name: str,
    value: bytes,
    ttl_s: float | None,
    expect: Expect | int,
    now_s: float,
) -> int:
    found = _version(db, name, now_s)
    rules.check_version(found, expect)
    version = rules.new_version(found, now_s)
    db.execute(
        "INSERT INTO value VALUES (?,?,?,?) ON CONFLICT (name) DO UPDATE SET "
        "body=excluded.body, version=excluded.version, expires=excluded.expires",
        (name, value, version, None if ttl_s is None else now_s + ttl_s),
    )
    return version


def delete_value(db: sqlite3.Connection, name: str, expect: Expect | int, now_s: float) -> None:
    if expect is not ANY:
        rules.check_version(_version(db, name, now_s), expect)
    db.execute("DELETE FROM value WHERE name=?", (name,))


def _version(db: sqlite3.Connection, name: str, now_s: float) -> int | None:
    sql = "SELECT version FROM value WHERE name=? AND (expires IS NULL OR expires>?)"
    row = db.execute(sql, (name, now_s)).fetchone()
    return None if row is None else row[0]


def append(
    db: sqlite3.Connection,
    name: str,
    first: int,
    records: Sequence[bytes],
    fence: int,
    ttl_s: float | None,
    keep: int | None,
    now_s: float,
) -> int:
    row = db.execute("SELECT id, next, fence, expires FROM stream WHERE name=?", (name,)).fetchone()
    is_expired = row is not None and row[3] is not None and row[3] <= now_s
    stream, next, highest = (None, 0, 0) if row is None or is_expired else row[:3]
    num_old = rules.num_repeated(next, highest, first, len(records), fence)
    if num_old and stream is not None:
        _check_repeated(db, stream, first, records[:num_old])
    if is_expired:
        forget_stream(db, name)
    next = max(next, first + len(records))
    expires = None if ttl_s is None else now_s + ttl_s
    if stream is None:
        sql = "INSERT INTO stream (name, next, fence, expires) VALUES (?,?,?,?) RETURNING id"
        (stream,) = db.execute(sql, (name, next, fence, expires)).fetchone()
    else:
        sql = "UPDATE stream SET next=?, fence=?, expires=? WHERE id=?"
        db.execute(sql, (next, fence, expires, stream))
    new = enumerate(records[num_old:], first + num_old)
    db.executemany("INSERT INTO record VALUES (?,?,?)", ((stream, n, body) for n, body in new))
    if keep is not None and next > keep:
        db.execute("DELETE FROM record WHERE stream=? AND n<?", (stream, next - keep))
    return next


def _check_repeated(
    db: sqlite3.Connection, stream: int, first: int, records: Sequence[bytes]
) -> None:
    rows = db.execute(
        "SELECT n, body FROM record WHERE stream=? AND n>=? AND n<? ORDER BY n",
        (stream, first, first + len(records)),
    ).fetchall()
    if rows:  # older ones may have been trimmed
        begin = rows[0][0]
        rules.check_repeated(begin, [body for _, body in rows], records[begin - first :])


def forget_stream(db: sqlite3.Connection, name: str) -> None:
    db.execute("INSERT INTO gone SELECT id FROM stream WHERE name=?", (name,))
    db.execute("DELETE FROM stream WHERE name=?", (name,))


def read(db: sqlite3.Connection, name: str, start: int, limit: int, now_s: float) -> Slice:
    rows = db.execute(
        "SELECT n, body FROM record WHERE n>=? AND stream=(SELECT id FROM stream WHERE name=? "
        "AND (expires IS NULL OR expires>?)) ORDER BY n LIMIT ?",
        (start, name, now_s, limit),
    ).fetchall()
    return Slice(rows[0][0] if rows else start, tuple(body for _, body in rows))


def take(db: sqlite3.Connection, buckets: Sequence[Bucket], now_s: float) -> Taken:
    sql = "SELECT level, at FROM bucket WHERE name=? AND (expires IS NULL OR expires>?)"
    levels = [db.execute(sql, (bucket.name, now_s)).fetchone() for bucket in buckets]
    taken, left = rules.draw(buckets, levels, now_s)
    if taken.is_granted or any(each is not None and each[1] > now_s for each in levels):
        for bucket, (level, at_s) in zip(buckets, left):
            ttl_s = rules.ttl_s(bucket, level)
            db.execute(
                "INSERT OR REPLACE INTO bucket VALUES (?,?,?,?)",
                (bucket.name, level, at_s, None if ttl_s is None else at_s + ttl_s),
            )
    return taken


def delete_stream_and_bucket(db: sqlite3.Connection, name: str) -> None:
    forget_stream(db, name)
    db.execute("DELETE FROM bucket WHERE name=?", (name,))


def sweep_values(db: sqlite3.Connection, now_s: float) -> bool:
    """Remove some of what has expired; whether there may be more."""
    sql = "DELETE FROM value WHERE name IN (SELECT name FROM value WHERE expires<=? LIMIT ?)"
    return db.execute(sql, (now_s, SWEEP_ROWS)).rowcount == SWEEP_ROWS


def sweep_streams(db: sqlite3.Connection, now_s: float) -> bool:
    expired = "SELECT name FROM stream WHERE expires<=? LIMIT ?"
    names = db.execute(expired, (now_s, SWEEP_ROWS)).fetchall()
    for (name,) in names:
        forget_stream(db, name)
    sql = "DELETE FROM bucket WHERE name IN (SELECT name FROM bucket WHERE expires<=? LIMIT ?)"
    num_buckets = db.execute(sql, (now_s, SWEEP_ROWS)).rowcount
    left = SWEEP_ROWS
    for (stream,) in db.execute("SELECT stream FROM gone LIMIT ?", (SWEEP_ROWS,)).fetchall():
        left -= db.execute(
            "DELETE FROM record WHERE stream=?1 AND n IN "
            "(SELECT n FROM record WHERE stream=?1 LIMIT ?2)",
            (stream, left),
        ).rowcount
        if left <= 0:
            return True
        db.execute("DELETE FROM gone WHERE stream=?", (stream,))
    return SWEEP_ROWS in (len(names), num_buckets)
