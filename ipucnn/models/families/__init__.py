"""The registered networks' builders, a module for each family, which the rows of ``models/registry.py`` name."""
