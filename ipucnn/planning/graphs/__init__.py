"""A network as the planner sees it: the layer graph, how a Keras model gives it, and the graphs that are shipped."""
