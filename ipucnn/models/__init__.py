"""The networks: a registry of frozen records, and what builds, edits and loads a network.

Each module of ``families`` has its networks' records beside their builders, which import TensorFlow themselves; a
module that is put there is found.  ``keras_config.py`` reads the configuration of a Keras model, for ``blueprint.py``,
``architecture.py`` and the planner.  ``blueprint.py`` and ``editing.py`` take a functional model apart, substitute
layers, seed the initial weights and assemble the model again; ``names.py`` has the canonical names of layers and
weights, the same under both versions of Keras.  ``build.py`` does all of it for a record.  Networks of users' own
(``own_networks.py``) become data first (``architecture.py``), and then go the same way.  ``layers`` holds what must
know micro-batches or draws random numbers without hidden state, in part with an operation of its own on IPUs
(``custom_ops``).  ``imagenet.py`` and ``keras_files.py`` bring weights from outside.
"""
