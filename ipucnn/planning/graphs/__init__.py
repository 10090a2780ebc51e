"""A network as the planner sees it: the layer graph, how a Keras model gives it, and the graphs that are shipped.

``layer_graph.py`` declares it.  It is read from a Keras model (``keras_graph.py``), shipped or cached
(``extract.py``, ``shipped.py``), or of a network in a file (``network_files.py``), for which ``stock_layers.py``
knows the shapes of Keras' layers.
"""
