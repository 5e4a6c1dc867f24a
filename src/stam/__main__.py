"""`python -m stam` is the command line."""

from stam.cli import main

main()
