"""Measuring throughput and time: what ``ipucnn benchmark`` does, without its tables.

``benchmark.py`` is one benchmark from configuration to report, ``keras_fit.py`` one of whole epochs.  Contenders are
timed: the session and Keras (``contenders.py``), and the input pipeline up to each of its parts
(``input_pipeline.py``).  ``measure.py`` times contenders in turns, ``statistics.py`` says how sure the figures are,
``prediction.py`` asks the planner, and ``report.py`` is the result and its folder.  ``records.py`` declares what its
files hold.  ``baseline.py`` compares with an earlier report.
"""
