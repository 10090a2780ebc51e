"""The networks: a registry of frozen records, and what builds, edits and loads a network.

``registry.py`` has a row for each network; the modules of ``families`` have the builders, which import TensorFlow
themselves and are imported when a network is built.  ``keras_config.py`` reads the configuration of a Keras model,
for ``blueprint.py``, ``architecture.py`` and the planner.  ``blueprint.py`` and ``editing.py`` take a functional
model apart, substitute layers, seed the initial weights and assemble the model again; ``names.py`` has the canonical
names of layers and weights, the same under both versions of Keras.  ``build.py`` does all of it for a record.
Networks of users' own (``own_networks.py``) become data first (``architecture.py``), and then go the same way.
``layers`` holds what must know micro-batches or draws random numbers without hidden state, in part with an operation
of its own on IPUs (``custom_ops``).  ``imagenet.py`` and ``keras_files.py`` bring weights from outside.
"""
