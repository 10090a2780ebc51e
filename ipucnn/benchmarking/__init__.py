"""Measuring throughput and time: what ``ipucnn benchmark`` does, without its tables.

``settings.py`` and ``benchmark.py`` check what was typed and make one value of it.  ``run.py`` goes from there to the
report: ``work.py`` compiles what is timed, its contenders (``contenders.py``, ``input_pipeline.py``), ``measure.py``
times them in turns, ``statistics.py`` says how sure the figures are, and ``prediction.py`` asks the planner.
``records.py`` declares what the files hold, and ``report.py`` reads and writes them.  ``baseline.py`` compares with an
earlier report.  ``suite.py`` plans a list of command lines, and ``suite_run.py`` runs each in a process of its own.
"""
