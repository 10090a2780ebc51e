"""The networks: a registry of frozen records, and the modules that build, edit and load a network.

``registry.py`` has a row for each network.  The modules of ``families`` have the builders; they are imported, and
import TensorFlow, when a network is built.  ``keras_config.py`` reads the configuration of a Keras model for
``blueprint.py``, ``architecture.py`` and the planner.  ``blueprint.py`` and ``editing.py`` take a functional model
apart, substitute layers, seed the initial weights and assemble the model again.  ``names.py`` has the canonical names
of layers and weights, which are the same in both versions of Keras.  ``build.py`` builds the network of a record.
Users' own networks (``own_networks.py``) are first converted to data (``architecture.py``) and then built in the same
way.  ``layers`` has the layers that must know micro-batches or draw random numbers without hidden state; one of them
uses a custom operation on IPUs (``custom_ops``).  ``imagenet.py`` and ``keras_files.py`` load weights of other
origin.
"""
