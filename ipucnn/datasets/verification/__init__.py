"""Verifying data sets: a walk over every sample that goes on where training would stop."""
