"""`python -m paceline`: the command line where nothing installed the script `paceline`."""

from paceline.cli import main

main()
