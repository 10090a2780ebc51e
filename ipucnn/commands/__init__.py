"""One thin module per command: its arguments, and which functions of the other packages it calls.

Each is imported only when it is run (``command_table.py`` has their names).  ``run_arguments.py`` has what several
commands take.  Commands hand the configuration what it needs from above, such as the planner's reader of
``--plan FILE``, and hand the events of a run to ``reports``.
"""
