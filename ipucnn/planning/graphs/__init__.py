"""The network as the planner sees it: the layer graph, its extraction from a Keras model, and the shipped graphs.

``layer_graph.py`` declares it.  It is read from a built Keras model (``keras_graph.py``); or it is shipped, cached, or
in a file of its own (``extract.py``, ``shipped.py``).
"""
