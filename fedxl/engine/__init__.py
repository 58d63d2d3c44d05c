"""Engines decide where a client's round runs; what it computes is the algorithm's affair."""
