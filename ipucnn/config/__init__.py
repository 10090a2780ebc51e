"""The configuration of a run: options, presets and flags, and the immutable ``RunConfig`` made from them.

``shared_options.py`` declares every option of a run once, and those that several commands share; flags, YAML keys, the
saved ``config.yml`` and the option reference are derived from them.  ``options.py`` joins those of runs, and
``command.py`` reads the options of a command.  ``spec.py`` defines a declaration, ``bounds.py`` the largest value of
each kind of option, and ``values.py`` reads values.  ``parameters.py`` has the keys of options that take a dictionary.
``rules.py`` has the options that exclude each other, and the type of all such rules.  ``resolve.py`` overlays the
defaults with a preset and then with flags, and records who gave each value; ``origin.py`` has the givers.
``presets.py`` reads presets, ``request.py`` has a command line before it is resolved, and ``help_page.py`` prints the
help.  Nothing here imports TensorFlow.
"""
