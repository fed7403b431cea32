"""`penstock certs`: makes, renews and shows certificates; security/authority.py does the work."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from cryptography import x509

from penstock.deployments.cli.tables import aligned
from penstock.deployments.security.authority import (
    CA,
    hosts_of,
    make_all,
    read_authority,
    read_certificates,
    renew_all,
)
from penstock.deployments.security.identity import CLUSTER_ROLES, WrongPeer, identity_of
from penstock.workers.errors import ConfigError


def run_certs(args: argparse.Namespace) -> int:
    """`penstock certs init`, `renew` or `show`; the exit status. Raises ConfigError or OSError."""
    return {"init": _init, "renew": _renew, "show": _show}[args.action](args)


def _init(args: argparse.Namespace) -> int:
    """Make the files, and say what to set."""
    folder = Path(args.folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder")
    present = sorted(path.name for path in folder.glob("*") if path.suffix in (".crt", ".key"))
    if present and not args.overwrite:
        raise ConfigError(
            f"{folder} has {', '.join(present)} already; `penstock certs renew {folder}` makes new "
            "certificates from its CA, and --overwrite begins anew with another CA"
        )
    make_all(folder, args.cluster, args.host, days=args.days)
    print("\n".join((*_table(folder), "", *_next_steps(folder))))
    return 0


def _renew(args: argparse.Namespace) -> int:
    """Make new leaf certificates."""
    folder = Path(args.folder)
    roles = renew_all(folder, days=args.days)
    ca = read_authority(folder).certificate
    print("\n".join(_table(folder)))
    print(
        f"\nnew: {', '.join(roles)}; running servers take them within 10 s, without a restart.\n"
        "Copy them to the machines that need them, a key and its certificate together. The CA "
        f"is the same, until {ca.not_valid_after_utc:%Y-%m-%d}."
    )
    return 0


def _show(args: argparse.Namespace) -> int:
    """Print the table; 1 if a certificate has expired."""
    path = Path(args.path)
    lines = _table(path)
    if not lines:
        raise ConfigError(f"{path} has no *.crt files; `penstock certs init {path}` makes some")
    print("\n".join(lines))
    now = datetime.datetime.now(datetime.UTC)
    is_expired = any(each.not_valid_after_utc <= now for _, each in _certificates(path))
    return 1 if is_expired else 0


def _certificates(path: Path) -> list[tuple[Path, x509.Certificate]]:
    """Those of a file, or of a folder's *.crt files, with their files. Raises ConfigError."""
    files = sorted(path.glob("*.crt")) if path.is_dir() else [path]
    return [(file, each) for file in files for each in read_certificates(file)]


def _table(path: Path) -> list[str]:
    rows = [("file", "identity", "host names", "expires", "")]
    rows += [(str(file), *_cells(each)) for file, each in _certificates(path)]
    return aligned(rows)


def _cells(certificate: x509.Certificate) -> tuple[str, str, str, str]:
    end = certificate.not_valid_after_utc
    days = (end - datetime.datetime.now(datetime.UTC)) / datetime.timedelta(days=1)
    left = (
        "EXPIRED" if days <= 0 else f"in {days:.0f} days" if days >= 2 else f"in {24 * days:.0f} h"
    )
    return _holder(certificate), ", ".join(hosts_of(certificate)) or "-", f"{end:%Y-%m-%d}", left


def _holder(certificate: x509.Certificate) -> str:
    """Its identity; of a CA, or of a certificate without one, the name of its subject."""
    try:
        return str(identity_of(certificate))
    except WrongPeer:
        name = certificate.subject.rfc4514_string() or "no name"
    try:
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_ca = False
    return f"{name} (CA)" if is_ca else name


def _next_steps(folder: Path) -> list[str]:
    ca = folder / f"{CA}.crt"
    return [
        "next:",
        f"  penstock serve --tls-cert-file {folder}/server.crt --tls-key-file {folder}/server.key",
        f"  penstock chat --url https://localhost:8000 --ca-file {ca}",
        "to serve only clients that show a certificate of this CA, add to these",
        f"  serve: --tls-client-ca-file {ca}",
        f"  chat:  --cert-file {folder}/client.crt --key-file {folder}/client.key",
        f"{folder}/{CA}.key makes new certificates: keep it off the machines that serve.",
        f"for connections between {', '.join(CLUSTER_ROLES)}: serve --cluster-certs-dir {folder}",
        f"before they expire: penstock certs renew {folder}",
    ]
