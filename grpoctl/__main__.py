"""`python -m grpoctl` is `grpoctl`."""

from grpoctl.cli import main

main()
