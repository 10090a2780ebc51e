"""Mutations of every call of the session to the SDK, grouped by call; see test_poplar_mutations.py."""
