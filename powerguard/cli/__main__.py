"""`python -m powerguard.cli`: the same as `powerguard`, where that isn't on the path."""

from powerguard.cli import main

main()
