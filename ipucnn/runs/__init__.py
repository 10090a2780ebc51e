"""Runs: what commands share between a configuration and a session (folder, checkpoints, training, loading).

``start.py`` decides where a run begins, and ``context.py`` makes the frozen ``RunContext`` of it; ``rules.py`` is the
table of options that have no effect or exclude each other.  ``train.py`` is one training run, ``recorder.py`` what it
makes of its session's events, and ``kfold.py`` a run per fold; ``trackers.py`` tells other tools of it.  ``setup.py``
makes the frozen ``Setup`` of a configuration: data, shapes, and how the network is built.  ``trained.py`` makes one
whose network has weights already, for ``evaluate.py``, ``infer.py`` and ``export.py``; ``predicting.py`` is what these
three share.  ``runtimes.py`` loads exported networks, and runs them as a script without this package:
``verification.py`` compares what they compute with the run, and ``exported.py`` takes them in place of a run.
``network_input.py`` describes their input.  ``images`` is what reads and writes images.  ``folder.py`` is the run
folder, ``checkpoints.py`` what a checkpoint holds beside weights, ``provenance.py`` where a result comes from, and
``compare.py`` reads run folders beside one another.
"""
