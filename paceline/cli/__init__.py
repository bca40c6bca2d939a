"""The command line: `paceline --help`."""

from paceline.cli.app import main

__all__ = ["main"]
