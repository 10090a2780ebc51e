"""Measures throughput and time: the work of ``ipucnn benchmark``, without its tables.

``settings.py`` has the settings of a benchmark, and ``rules.py`` the options that do not go together.  A ``Job``
(``job.py``) is everything that is decided before TensorFlow is imported.  ``run.py`` leads from it to the report:
``work.py`` compiles the timed work (``contenders.py``, ``input_pipeline.py``), ``rounds.py`` times it in turns,
``peak.py`` measures the machine, ``prediction.py`` asks the planner for predictions, and ``report.py`` makes the report
of the rounds, with the uncertainty of the figures from ``intervals.py``.  ``records.py`` declares what the report
contains, ``figures.py`` the figures that rows of a suite have, and ``keras_fit.py`` runs the row of plain Keras.
``baseline.py`` reads an earlier report and compares with it, and ``observation.py`` reads what a report or a run
measured on IPUs.  ``suite.py`` plans a list of command lines, and ``suite_run.py`` runs each in a process of its own.
"""
