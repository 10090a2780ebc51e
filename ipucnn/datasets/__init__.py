"""Data sets: the table of them, their readers, and the ``tf.data`` pipelines that feed networks.

``registry.py`` has the table of data sets, chooses one and opens it.  ``sources`` and ``segmentation`` read files
into the types that ``base.py`` declares, and ``pipeline.py`` turns these into ``tf.data``.  Order and augmentation
are pure functions of (seed, epoch, index); those of ``mixing.py`` depend on whole micro-batches.  Readers check
``limits.py`` before they allocate: ``forms.py`` reads the size of an image before it is decoded, and
``sources/tfrecord.py`` reads records without TensorFlow.  ``verification`` implements ``verify-dataset``.  For folders
that are refused, ``sorting.py`` makes a set of them by tables (``tables.py``) and lists of parts (``part_lists.py``).
"""
