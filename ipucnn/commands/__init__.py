"""One module per command: a class that declares its options, and the function of its name, which gets them.

A module is imported only when its command runs (``command_table.py`` has the names).  The options that several
commands share are in ``config/shared_options.py``; ``run_arguments.py`` reads ``--plan FILE``,
and ``rules.py`` has the options of single commands that do not go together.
Commands give the configuration what it must not import itself, such as the planner's reader of plans.  The work of a
command is a generator of events (``events.py``), which a screen of ``reports`` shows.
"""
