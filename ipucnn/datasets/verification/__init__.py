"""Verification of data sets: it checks every sample, and continues after problems that would end training.

``verify.py`` chooses the set and decodes all samples.  ``readers.py`` finds the samples of each kind of set with
training's own readers.  ``survey.py`` collects problems of files and samples, and draws conclusions from all samples.
``samples.py`` has the types of samples, and ``findings.py`` has every code with its severity and hint.
"""
