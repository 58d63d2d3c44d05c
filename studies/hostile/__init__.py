"""How much clients that lie cost, with each defence."""
