"""The Poplar session: IPUs through the Poplar SDK's TensorFlow and Keras.

Before TensorFlow is imported, ``sdk_environment.py`` checks the SDK's environment and sets its flags, and ``checks.py``
refuses Programs that the SDK would refuse later.  Then ``device.py`` imports the SDK's modules and configures the
system with the table of ``options.py``.  ``model.py`` rebuilds the network for one purpose, with static micro-batches
and stages.  ``session.py`` has it trained by ``training.py``, with the weight updates of
``optimizer.py``; ``prediction.py`` computes logits.  Both take their batches from ``batches.py``.  ``errors.py``
translates the SDK's errors.

Tests run on a test double of the SDK (``tests/poplar_double``), made from recorded facts of its API.  What it cannot
show is listed in docs/contributing/hardware-checklist.md.
"""
