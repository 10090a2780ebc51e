"""A network as the planner sees it: the layer graph, how a Keras model gives it, and the graphs that are shipped.

``layer_graph.py`` declares it.  It is read from a built Keras model (``keras_graph.py``); or it is shipped, cached, or
in a file of its own (``extract.py``, ``shipped.py``).
"""
