"""The networks: a registry of frozen records, and the modules that build, edit and load a network.

``registry.py`` has a row for each network. The modules of ``families`` have the builders; they are imported, and import
TensorFlow, when a network is built.  ``keras_config.py`` reads the configuration of a Keras model as a ``Blueprint``
(``blueprint.py``), a list of nodes, which is edited (``editing.py``) and assembled into a new model; the planner reads
it, too.  ``preprocessing.py`` has the scaling with which networks begin.  ``names.py`` has the canonical names of
layers and weights, which are the same in both versions of Keras.  ``build.py`` builds the network of a record.
``own.py`` decides how a user's own network is converted; ``settings.py`` spells the settings of its layers.  ``layers``
has the layers that must know micro-batches or draw random numbers without hidden state; one of them uses a custom
operation on IPUs (``custom_ops.py``).  ``imagenet.py`` and ``keras_files.py`` load weights of other origin.
"""
