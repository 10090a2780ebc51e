"""Convolutional networks on Graphcore IPUs, and with the IPU's semantics everywhere else."""

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "export", "load", "plan", "read_history", "train"]


def __getattr__(name: str) -> object:
    """The Python API, which is imported when it is used."""
    if name not in __all__:
        raise AttributeError(f"module 'ipucnn' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module("ipucnn.api"), name)
