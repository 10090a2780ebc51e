"""Suites: many benchmarks from one file, each in a process of its own, with one result that can be resumed."""
