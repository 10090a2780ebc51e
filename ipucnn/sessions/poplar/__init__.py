"""The Poplar session: IPUs through the Poplar SDK's TensorFlow and Keras.

Before TensorFlow is imported, ``surroundings.py`` looks at what surrounds the SDK, judges it and sets its flags,
and ``checks.py`` refuses what the SDK would refuse later.  After that, ``device.py`` has the SDK's modules and
configures the system; ``config.py`` is one table from options to leaves of
``IPUConfig``; ``model.py`` builds the network again with static micro-batches and stages, for ``training.py`` and
``evaluation.py``.  ``errors.py`` translates what the SDK raises, and ``popdist.py`` knows its instances.

``tests/poplar_double`` stands in for the SDK, made from recorded facts of its API.  What no double can show is in
docs/contributing/hardware-checklist.md.
"""
