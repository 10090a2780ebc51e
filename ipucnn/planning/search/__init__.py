"""Searches for splits: exactly under given settings, then over settings, with a proof or the reason why nothing fits.

``tables.py`` puts times and memory into ``StageTables``, the only input of the exact search (``exact.py``,
``minmax.py``).  The search returns a ``Solution`` with its lower bound, or a certificate that nothing fits.
``planner.py`` compares splits under given settings, ``no_fit.py`` explains why none fits, and ``configurations.py``
searches over stages, schedules, micro-batches and replicas.  ``advice.py`` predicts the effect of a change to a
program.
"""
