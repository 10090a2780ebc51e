"""Diagnoses this machine: what is installed, what each command would run on, and how to add what is missing.

Nothing here imports TensorFlow; ``probe`` imports it in a process of its own.
"""
