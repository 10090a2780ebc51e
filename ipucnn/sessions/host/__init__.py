"""The host session: any CPU or GPU through stock TensorFlow, with the IPU's semantics.

``session.py`` computes a weight update of R replicas x G micro-batches of B samples as few large batches, with
batch norm per micro-batch and moving statistics in closed form; a test proves it equal to a naive loop.
``division.py`` says how a weight update is divided, ``updates.py`` is the loop of weight updates, and
``statistics.py`` has batch norm's statistics.  ``network.py`` computes the network layer by layer: ``fast_layers.py``
has what a CPU computes differently from Keras' layers, in part by ``kernels.py``, which Numba compiles, and
``arithmetic.py`` has what 16 bits are.  ``environment.py`` imports TensorFlow and Numba.  ``workers.py`` finds out
which workers share the work, and ``cluster.py`` is how they meet and what they exchange.
"""
