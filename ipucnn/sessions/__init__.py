"""Sessions run a Program, on a host or on IPUs, under one contract.

``session.py`` has the contract and the one training loop, and ``factory.py`` is the only module that knows which
hardware is present.  ``processes.py`` has the processes of one run.  ``host`` and ``poplar`` are the two sessions.
"""
