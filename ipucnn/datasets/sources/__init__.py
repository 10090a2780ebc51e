"""Sources: each reads one kind of files, or makes images, for classification.  No TensorFlow but for TFDS."""
