"""The configuration of a run: options, presets and flags, and the immutable ``RunConfig`` that they give.

``options.py`` joins the panels, in which every option is declared once; flags, YAML keys, the saved ``config.yml``
and the option reference are derived from them.  ``spec.py`` is such a declaration, ``bounds.py`` has the largest
value of each kind of option, and ``values.py`` reads values.  ``rules.py`` has the options that do not go together.
``resolve.py`` lays a preset over the defaults and flags over the preset, and keeps where each value came from.  Nothing
here imports TensorFlow.
"""
