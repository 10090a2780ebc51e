"""Verifying data sets: a walk over every sample that goes on where training would stop.

``verify.py`` decides which set is meant, what is published about it, and looks at all samples.  ``walks.py`` reads the
files of each kind of set with training's own readers, and ``survey.py`` hears what is wrong with files and samples, and
concludes.  ``findings.py`` has every code with its severity and hint.
"""
