"""Readers of one kind of files each, and generators, for classification.  Only TFDS needs TensorFlow."""
