"""Runs: what commands share between a configuration and a session (folder, checkpoints, training, loading)."""
