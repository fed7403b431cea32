"""`python -m penstock.deployments.cli`: the `penstock` command."""

import sys

from penstock.deployments.cli.main import main

sys.exit(main())
