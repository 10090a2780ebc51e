"""One module per command: a class that declares its options, and the function of its name, which gets them.

A module is imported only when its command runs (``command_table.py`` has the names).  ``run_arguments.py`` has the
arguments that several commands share.  Commands give the configuration what it must not import itself, such as the
planner's reader of ``--plan FILE``, and pass the events of a run to ``reports``.
"""
