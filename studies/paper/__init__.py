"""The FeDXL paper's tables, running times and ablations: ours beside theirs."""
