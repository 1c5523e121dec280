"""`python -m eeinfer` is the `eeinfer` command."""

from eeinfer.cli.app import main

main()
