"""Measures throughput and time: the work of ``ipucnn benchmark``, without its tables.

``settings.py`` and ``benchmark.py`` check the typed options and make one value of them.  ``run.py`` continues from
there to the report: ``work.py`` compiles the timed work (``contenders.py``, ``input_pipeline.py``), ``measure.py``
times it in turns, ``statistics.py`` computes the uncertainty of the figures, and ``prediction.py`` asks the planner for
predictions.  ``records.py`` declares the contents of the files, and ``report.py`` reads and writes them.
``baseline.py`` compares with an earlier report.  ``suite.py`` plans a list of command lines, and ``suite_run.py`` runs
each in a process of its own.
"""
