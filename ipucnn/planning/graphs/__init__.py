"""A network as the planner sees it: the layer graph, how it is read from a Keras model, and the graphs that are shipped."""
