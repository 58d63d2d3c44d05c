"""The search for settings: the same budget for every algorithm, validation data only."""
