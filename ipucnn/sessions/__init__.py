"""Sessions: what runs a Program, on a host or on IPUs, under one contract.

``session.py`` is the contract and the one training loop, and ``factory.py`` the one place that knows what hardware
is here.  ``host`` and ``poplar`` are the two sessions.
"""
