"""Sessions run a Program, on a host or on IPUs, under one contract.

``session.py`` has the contract: a session, an open device, makes trainers and predictors.  It also has the one training
loop.  ``factory.py`` is the only module that knows which hardware is present.  ``evaluated.py`` decides which weights
are evaluated and saved.  ``group.py`` decides which processes train together, ``mpi.py`` connects them, and ``role.py``
says what each may print and write.  ``host`` and ``poplar`` are the two sessions.
"""
