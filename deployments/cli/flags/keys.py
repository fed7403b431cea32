"""The flags of `penstock keys`, and its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from penstock.deployments.cli.flags.commands import add_command
from penstock.deployments.security.records import MAX_PRIORITY
from penstock.deployments.security.roles import Role

EPILOG = """\
A server with --api-keys-file FILE accepts the keys of that file. It reads the file again when it
changes: new keys are good, and revoked ones are refused, within a second and without a restart.
On several machines, give each the same file.

A key belongs to a tenant. Keys of one tenant see the same files, batches and stored responses, and
share one quota. To rotate a key, add a second one for its tenant, give it to the client, and revoke
the first.

  infer    ask the model: chat, completions, files, batches (the default)
  metrics  see how the cluster is (penstock status)
  queue    see the tenant's waiting requests (penstock queue); with admin, those of all tenants
  admin    everything
"""
ADD = """\
The key is printed once, on standard output; the file has only its digest. Flags of quotas and the
weight hold for the tenant: what is not given is as in the tenant's last key.

examples:
  penstock keys add --file keys --tenant acme
  penstock keys add --file keys --tenant acme --expires 90d --requests-per-minute 60 \\
      --tokens-per-day 2M --note "web shop" > acme.key
  penstock keys add --file keys --tenant ops --role metrics --role queue --role admin
  penstock keys add --file keys --tenant nightly --max-priority 50 --weight 0.5
"""
LIST = """\
examples:
  penstock keys list --file keys
"""
REVOKE = """\
The line of the key stays, with the time of the revocation: new requests with the key are refused
with the error api_key_revoked, and its running streams end with it within a second.

examples:
  penstock keys list --file keys               shows the ids; the id is also the part after psk_
  penstock keys revoke --file keys mfrggzdf
"""


def add_keys(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `keys` and its actions to the commands of the command line."""
    keys = add_command(
        commands,
        "keys",
        help="make, list and revoke the API keys of a server",
        description="Make, list and revoke the API keys in a server's file of keys.",
        epilog=EPILOG,
    )
    actions = keys.add_subparsers(title="actions", required=True, metavar="ACTION")
    add = _action(actions, "add", "make a key and print it", ADD)
    _add_key_flags(add)
    _add_tenant_flags(add)
    add.set_defaults(run=run, action="add")
    listing = _action(actions, "list", "show the keys of a file, without their secrets", LIST)
    listing.set_defaults(run=run, action="list")
    revoke = _action(actions, "revoke", "end a key, and the streams that it has begun", REVOKE)
    revoke.add_argument("key_ids", metavar="ID", nargs="+", help="id of a key, as `list` shows it")
    revoke.set_defaults(run=run, action="revoke")


def _action(actions: Any, name: str, help: str, epilog: str) -> argparse.ArgumentParser:
    description = f"{help[0].upper()}{help[1:]}."
    parser = add_command(actions, name, help=help, description=description, epilog=epilog)
    parser.add_argument(
        "--file", metavar="FILE", required=True, help="file of keys, the server's api_keys_file"
    )
    return parser


def _add_key_flags(add: argparse.ArgumentParser) -> None:
    key = add.add_argument_group("the key")
    key.add_argument(
        "--tenant",
        metavar="NAME",
        required=True,
        help="who holds the key: 1 to 64 of A-Z a-z 0-9 . _ -; the name is in queues and records",
    )
    key.add_argument(
        "--role",
        action="append",
        choices=list(Role),
        help="what the key may do; repeatable (default: infer)",
    )
    key.add_argument(
        "--expires",
        metavar="WHEN",
        help="after 90d, 12h or 30m, or at a date or time as 2027-01-31 (UTC); none: never",
    )
    key.add_argument(
        "--not-before", metavar="WHEN", help="from when on it is valid, in the same form; none: now"
    )
    key.add_argument(
        "--max-priority",
        type=int,
        metavar="N",
        default=0,
        help="the highest priority that its requests may have: of waiting requests the lowest "
        f"number goes first, 0 to {MAX_PRIORITY} (default: 0)",
    )
    key.add_argument("--note", metavar="TEXT", default="", help="for operators, as its purpose")


def _add_tenant_flags(add: argparse.ArgumentParser) -> None:
    tenant = add.add_argument_group("the tenant")
    for what, of in (("requests", "requests"), ("tokens", "tokens of prompts and answers")):
        for span in ("minute", "day"):
            tenant.add_argument(
                f"--{what}-per-{span}",
                metavar="N",
                help=f"most {of} in a {span}, as 500, 20k or 3M; none: no limit",
            )
    tenant.add_argument(
        "--weight",
        type=float,
        metavar="X",
        help="share of the capacity beside other tenants that wait; 2 gets twice as much as 1 "
        "(default: 1)",
    )
