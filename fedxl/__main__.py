"""`python -m fedxl`: the command line."""

from fedxl.cli.main import main

main()
