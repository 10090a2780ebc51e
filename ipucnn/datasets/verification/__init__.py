"""Verifying data sets: every sample is checked, and checking goes on where training would stop.

``verify.py`` decides which set is meant and decodes all samples.  ``lots.py`` finds the samples of each kind of set
with training's own readers.  ``survey.py`` is told what is wrong with files and samples, and concludes; ``samples.py``
has what is kept of samples, and ``findings.py`` every code with its severity and hint.
"""
