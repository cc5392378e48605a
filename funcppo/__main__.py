"""`python -m funcppo`: the same programs as `funcppo`."""

from funcppo.cli import main

main()
