"""`python -m grpoctl` is `grpoctl`."""

from grpoctl.cli.main import main

main()
