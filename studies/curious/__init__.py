"""What a curious server or site can work out from scores, with each option that is there against it."""
