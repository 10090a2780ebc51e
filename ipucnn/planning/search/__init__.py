"""Searches for splits: exactly under given settings, then over settings, with a proof or the reason why nothing fits.

``tables.py`` puts times and memory into ``StageTables``, the only input of the exact search (``exact.py``,
``minmax.py``).  The search returns a ``Solution`` with its lower bound, or a certificate that nothing fits.
``open_settings.py`` has the values of each open setting.  ``planner.py`` finds the fastest splits of a program and
the fastest of several programs, and ``front.py`` the best uses of a number of IPUs.  ``neighbours.py`` has the one list
of changes of a program, which says what would fit and what would be faster.
"""
