"""`penstock keys`: makes, lists and revokes the API keys in a server's file."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.deployments.cli.tables import aligned
from penstock.deployments.security.key_file import change_key_file, read_key_file
from penstock.deployments.security.key_format import new_key, parse_key
from penstock.deployments.security.records import (
    MAX_LIMIT,
    MAX_PRIORITY,
    QUOTA_NAMES,
    KeyRecord,
    QuotaLimits,
    Terms,
    check_tenant,
    check_weight,
    record_from,
    time_from,
    time_text,
)
from penstock.deployments.security.roles import Role
from penstock.workers.errors import ConfigError

_UNITS_S = {"m": 60, "h": 3600, "d": 86400}
T = TypeVar("T")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def run_keys(args: argparse.Namespace) -> int:
    """Run `args.action`; the exit status. Raises ConfigError or OSError."""
    return {"add": _add, "list": _list, "revoke": _revoke}[args.action](args)


def _add(args: argparse.Namespace) -> int:
    """Add a key to the file and print it."""
    now_s, key = time.time(), new_key()
    record = KeyRecord(
        key.key_id,
        key.digest,
        _checked("--tenant", check_tenant, args.tenant),
        frozenset(map(Role, args.role or [Role.INFER])),
        not_before=_moment("--not-before", args.not_before, now_s),
        expires=_moment("--expires", args.expires, now_s),
        max_priority=args.max_priority,
        note=args.note,
    )
    if not 0 <= record.max_priority <= MAX_PRIORITY:
        raise ConfigError(f"--max-priority must be 0 to {MAX_PRIORITY}; got {record.max_priority}")
    if record.expires is not None and record.expires <= (record.not_before or now_s):
        raise ConfigError(f"--expires {args.expires} is over before the key is valid")

    def change(lines: list[str]) -> list[str]:
        nonlocal record
        before = [each for each in map(_record_of, lines) if each and each.revoked is None]
        own = [each for each in before if each.tenant == record.tenant]
        record = replace(record, terms=_terms(args, own[-1].terms if own else Terms()))
        return [*lines, record.as_line()]

    change_key_file(args.file, change)
    until = "it never expires" if record.expires is None else f"until {time_text(record.expires)}"
    print(
        f"key {record.key_id} of tenant {record.tenant}, roles {', '.join(sorted(record.roles))}, "
        f"{until}; it is shown this once, and {args.file} has its digest:",
        file=sys.stderr,
    )
    print(key.text)
    return 0


def _list(args: argparse.Namespace) -> int:
    """Print the keys of the file."""
    now_s = time.time()
    head = ("id", "tenant", "roles", "state", "expires", "quotas", "weight", "priority", "note")
    rows = [head, *(_row(each, now_s) for each in read_key_file(args.file))]
    print("\n".join(aligned(rows)))
    return 0


def _revoke(args: argparse.Namespace) -> int:
    """Mark keys as revoked."""
    wanted, now_s = set(args.key_ids), time.time()

    for each in args.key_ids:
        if (key := parse_key(each)) is not None:  # and so not repeated
            raise ConfigError(f"name a key by its id, and not by the whole key: {key.key_id}")
    if not Path(args.file).expanduser().exists():
        raise ConfigError(f"cannot read --file {args.file}: No such file or directory")

    def change(lines: list[str]) -> list[str]:
        missing = wanted - {each.key_id for each in map(_record_of, lines) if each}
        if missing:
            raise ConfigError(
                f"{args.file} has no key {sorted(missing)[0]}; `penstock keys list --file "
                f"{args.file}` shows the ids"
            )
        return [_revoked(line, wanted, now_s) for line in lines]

    change_key_file(args.file, change)
    print(f"revoked: {', '.join(sorted(wanted))}", file=sys.stderr)
    return 0


def _record_of(line: str) -> KeyRecord | None:
    """None: a comment or a blank line."""
    return None if not line.strip() or line.startswith("#") else record_from(line.strip())


def _revoked(line: str, key_ids: set[str], now_s: float) -> str:
    """The line, of a key of these ids with the time. A bare key becomes a record, which no key
    opens, and which tells the server to end its streams."""
    record = _record_of(line)
    if record is None or record.key_id not in key_ids or record.revoked is not None:
        return line
    return replace(record, revoked=now_s).as_line()


def _terms(args: argparse.Namespace, before: Terms) -> Terms:
    """As the flags say; what they do not say is as before."""
    limits = {name: getattr(before.quotas, name) for name in QUOTA_NAMES}
    for name in QUOTA_NAMES:
        if (text := getattr(args, name)) is not None:
            limits[name] = _limit(f"--{name.replace('_', '-')}", text)
    weight = before.weight
    if args.weight is not None:
        weight = _checked("--weight", check_weight, args.weight)
    return Terms(weight, QuotaLimits(**limits))


def _limit(flag: str, text: str) -> int | None:
    if text == "none":
        return None
    found = re.fullmatch(r"([0-9]{1,13})([kMG]?)", text)
    limit = int(found[1]) * _FACTORS[found[2]] if found else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"{flag} must be a number as 500, 20k or 3M, or none; got {text!r}")
    return limit


def _moment(flag: str, text: str | None, now_s: float) -> float | None:
    """Unix time; None: none is given."""
    if text is None or text in ("never", "now"):
        return None
    found = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
    try:
        return now_s + int(found[1]) * _UNITS_S[found[2]] if found else time_from(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{flag} must be a time from now, as 90d, 12h or 30m, or a date as 2027-01-31; "
            f"got {text!r}"
        ) from None


def _checked(flag: str, check: Callable[[Any], T], value: Any) -> T:
    try:
        return check(value)
    except ValueError as error:
        raise ConfigError(f"{flag} must be {error}; got {value!r}") from None


def _row(record: KeyRecord, now_s: float) -> tuple[str, ...]:
    quotas = record.terms.quotas
    limits = ", ".join(
        f"{getattr(quotas, name)} {name.replace('_per_', '/')}"
        for name in QUOTA_NAMES
        if getattr(quotas, name) is not None
    )
    expires = "never" if record.expires is None else time_text(record.expires)
    return (
        record.key_id,
        record.tenant,
        ",".join(sorted(record.roles)),
        _state(record, now_s),
        expires,
        limits or "none",
        f"{record.terms.weight:g}",
        str(record.max_priority),
        record.note,
    )


def _state(record: KeyRecord, now_s: float) -> str:
    if record.revoked is not None:
        return "revoked"
    if record.expires is not None and record.expires <= now_s:
        return "expired"
    if record.not_before is not None and record.not_before > now_s:
        return "not yet valid"
    return "valid"
