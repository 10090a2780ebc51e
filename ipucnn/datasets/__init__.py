"""The data sets: which there are, how they are read, and how ``tf.data`` is made of them.

``registry.py`` has the table of data sets, chooses one and opens it.  ``sources`` and ``segmentation`` read files
into what ``base.py`` declares, and ``pipeline.py`` makes ``tf.data`` of it.  Order and augmentation are pure
functions of (seed, epoch, index), ``mixing.py`` of whole micro-batches.  A reader asks ``limits.py`` before it
allocates: ``image_headers.py`` has the size of an image before it is decoded, and ``sources/tfrecord.py`` reads
records without TensorFlow.  ``verification`` is ``verify-dataset``.
"""
