"""This package's Keras layers: layers that must know micro-batches, and layers that compute each sample separately.

Importing its modules imports TensorFlow.
"""
