"""The command line: Typer signatures here, heavy imports inside the bodies, so that `--help` never imports torch."""
