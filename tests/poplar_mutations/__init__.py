"""Mutations of everything the session tells the SDK, by the calls that are mutated; see test_poplar_mutations.py."""
