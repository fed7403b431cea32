"""The flags of `penstock certs`, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.cli.flags.types import positive

LEAF_DAYS = 30
EPILOG = """\
A CA (ca.crt, ca.key) signs the other certificates. A client trusts what the CA has signed: give
ca.crt to clients, and keep ca.key where no server runs. Each role has a certificate of its own:

  server   what HTTP and gRPC show to clients: tls_cert_file, tls_key_file
  client   what a client shows to a server that asks for it (tls_client_ca_file)
  worker, ingress, gate
           what the parts of a cluster show to one another: cluster_certs_dir

Each names its holder as penstock://CLUSTER/ROLE/ID; that of the server has the names of its hosts.
They are valid for 30 days, and `certs renew` makes new ones. A running server takes them within
10 s: its streams go on, new connections get the new certificate.

examples:
  penstock certs init ./certs                                    for this machine only
  penstock certs init ./certs --host api.example.com --host 10.0.0.7
  penstock certs renew ./certs                                   new keys and certificates, same CA
  penstock certs show ./certs                                    names, roles and dates
  penstock serve --tls-cert-file certs/server.crt --tls-key-file certs/server.key
  penstock chat --url https://localhost:8000 --ca-file certs/ca.crt
"""


def add_certs(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `certs init`, `renew` and `show` to the commands; `action` names which was given."""
    certs = add_command(
        commands,
        "certs",
        help="make, renew and show TLS certificates",
        description="Make, renew and show TLS certificates, for a cluster without a CA of its own.",
        epilog=EPILOG,
    )
    forms = certs.add_subparsers(title="what to do", required=True, metavar="WHAT")
    init = add_command(
        forms,
        "init",
        help="make a CA, and a certificate for each role",
        description="Make a CA, and a certificate for each role, in a folder.",
        epilog=EPILOG,
    )
    init.add_argument("folder", metavar="DIR", help="folder for the files; made if it is missing")
    init.add_argument(
        "--cluster",
        metavar="NAME",
        default="penstock",
        help="name of the cluster; its parts refuse those of another one (default: penstock)",
    )
    init.add_argument(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help="DNS name or IP address under which clients reach the server; repeatable; localhost, "
        "127.0.0.1 and ::1 are always in",
    )
    _add_days(init)
    init.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the files of DIR, the CA too: its clients need the new ca.crt then",
    )
    init.set_defaults(run=run, action="init")
    renew = add_command(
        forms,
        "renew",
        help="make new certificates from the CA of a folder",
        description="Make new keys and certificates for the roles in a folder, with the names that "
        "they have, signed by the CA in it.",
        epilog=EPILOG,
    )
    renew.add_argument("folder", metavar="DIR", help="folder of `certs init`, with ca.key in it")
    _add_days(renew)
    renew.set_defaults(run=run, action="renew")
    show = add_command(
        forms,
        "show",
        help="show names, roles and dates of certificates",
        description="Show names, roles and dates of certificates. Exit status: 1 if one has "
        "expired.",
        epilog=EPILOG,
    )
    show.add_argument("path", metavar="DIR|FILE", help="a file in PEM, or a folder of *.crt files")
    show.set_defaults(run=run, action="show")


def _add_days(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--days",
        type=positive,
        metavar="N",
        default=LEAF_DAYS,
        help=f"days for which the certificates are valid (default: {LEAF_DAYS}); the CA: ten years",
    )
