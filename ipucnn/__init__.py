"""Convolutional networks on Graphcore IPUs, or on any CPU or GPU with the IPU's semantics."""

__version__ = "0.1.0"
__all__ = ["__version__", "evaluate", "export", "load", "plan", "read_history", "train"]


def __getattr__(name: str) -> object:
    """Imports the Python API on its first use."""
    if name not in __all__:
        raise AttributeError(f"module 'ipucnn' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module("ipucnn.api"), name)
