"""Convolutional networks on Graphcore IPUs, and with the IPU's semantics everywhere else."""

__version__ = "0.1.0"
