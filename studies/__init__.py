"""Studies of the paper and of this library: `python -m studies --help`. They are not part of the wheel."""
