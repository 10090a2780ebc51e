"""Verifying data sets: a walk over every sample that goes on where training would stop.

``verify.py`` decides which set is meant and what is published about it.  A walk for each kind of set (``arrays.py``,
``folders.py``, ``records.py``) goes over all samples with training's own readers, and ``survey.py`` keeps digests
and counts of them, from which it concludes.  ``findings.py`` has every code with its severity and hint.
"""
