"""The command that starts SuperLink."""

from flwr.superlink.cli.flower_superlink import flower_superlink as flower_superlink
