"""Plans how to split a network into pipeline stages over IPUs, and predicts the result.

TensorFlow is imported only for networks whose layer graph is neither shipped nor cached.  ``question.py`` turns a
configuration into a ``Question`` (``rules.py`` has the options that do not go together), and ``plan.py`` turns that
into a ``PipelinePlan``: the one value that is saved, compared, run and rendered (``pipeline_plan.py``).  ``program.py``
holds a program to be planned: everything besides network and machine that cost and memory depend on.  ``schedules.py``
defines what runs when.  ``network.py`` determines how a configuration's network is built, ``graphs`` represents it as a
``LayerGraph``, ``cost`` predicts the graph's seconds and bytes, ``forecast.py`` those of a program under given splits,
and ``search`` finds the best split with a proof.  ``splits.py`` holds the splits that users name, those of heuristics,
and those of a training run; ``calibration.py`` fits a machine's times to measurements.  This package imports nothing
from the layers above it: sessions pass in what only they know.
"""
