"""The builders of the registered networks, a module for each family; the rows of ``models/registry.py`` name them."""
