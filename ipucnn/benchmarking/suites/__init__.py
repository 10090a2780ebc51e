"""Suites: many benchmarks from one file, each in a process of its own, with one result that can be resumed.

``file.py`` reads the rows, ``plan.py`` resolves all of them before the first one runs, ``run.py`` runs them, and
``result.py`` has their figures and speed-ups.
"""
