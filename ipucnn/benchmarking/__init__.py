"""Measures throughput and time: the work of ``ipucnn benchmark``, without its tables.

``settings.py`` and ``benchmark.py`` check the typed options and make one value of them.  ``run.py`` continues from
there to the results: ``work.py`` compiles the timed work (``contenders.py``, ``input_pipeline.py``), ``measure.py``
times it in turns, and ``prediction.py`` asks the planner for predictions.  ``report.py`` makes the report of the
results, with the uncertainty of the figures from ``statistics.py``; ``records.py`` declares what it contains.
``baseline.py`` reads an earlier report and compares with it.  ``suite.py`` plans a list of command lines, and
``suite_run.py`` runs each in a process of its own.
"""
