"""The host session: any CPU or GPU through stock TensorFlow, with the IPU's semantics.

``session.py`` computes a weight update of R replicas x G micro-batches of B samples as few large batches, with
batch norm per micro-batch and moving statistics in closed form; a test verifies it against a naive loop.
``division.py`` divides a weight update, ``updates.py`` is the loop of weight updates and adds the results of groups,
and ``statistics.py`` has batch norm's statistics.  ``network.py`` computes the network layer by layer:
``fast_layers.py`` has the layers that a CPU computes differently from Keras, some of them with ``operations.py``, whose
code Numba compiles (``kernels.py``), and ``arithmetic.py`` emulates 16-bit numbers.  ``environment.py`` imports
TensorFlow and Numba.  ``agreement.py`` compares the processes that train together, ``collectives.py`` gathers their
gradients, and ``gpus.py`` shares the GPUs among them.
"""
