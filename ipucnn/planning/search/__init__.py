"""The search for splits: exact for given settings, then over settings, with a proof or the reason why nothing fits.

``tables.py`` puts times and memory into ``StageTables``, all that the exact search (``exact.py``, ``minmax.py``)
knows.  It returns a ``Solution`` with its lower bound, or the certificate of what fits nowhere.  ``planner.py``
compares splits under given settings, ``no_fit.py`` says why none fits, and ``configurations.py`` goes over stages,
schedules, micro-batches and replicas.  ``variations.py`` judges what a change of a program would bring.
"""
