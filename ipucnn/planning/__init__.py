"""Planning: how to split a network into pipeline stages over IPUs, and what is predicted for the split.

TensorFlow is imported only for networks whose layer graph is neither shipped nor cached.  ``request.py`` makes a
``PlanRequest`` of a configuration, ``plan.py`` a ``PipelinePlan`` of that: the one value that is saved, compared, run
and rendered (``pipeline_plan.py``).  ``settings.py`` has what cost and memory depend on besides network and machine,
``schedules.py`` what runs when.  ``network.py`` says how a configuration's network is built, ``graphs`` gives it as a
``LayerGraph``, ``cost`` gives the graph seconds and bytes, and ``search`` finds the best split with a proof.
``splits.py`` has the splits that users name, those of simple rules, and those of a training run; ``calibration.py``
fits a machine's times to what was measured on it.  Nothing above is imported: what only a session knows is passed in.
"""
