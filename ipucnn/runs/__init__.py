"""Runs: what commands share between a configuration and a session (folder, checkpoints, training, loading).

Start and training: ``resume.py`` decides how a run begins or continues, and ``context.py`` makes its frozen
``RunContext``.  ``rules.py`` has the tables of options that have no effect or exclude each other.  ``setup.py`` makes
the frozen ``Setup`` of a configuration: data, shapes, and how the network is built.  ``train.py`` is one training run,
``recorder.py`` records the events of its session, ``trackers.py`` and ``mlperf.py`` report them to other tools, and
``kfold.py`` runs each fold.  ``input_size.py`` warns of images of another size than the weights', and
``weight_files.py`` compares how the images of a Keras file were scaled.

Trained networks: ``sources.py`` has a class for each source of trained weights, and ``trained.py`` makes a setup whose
network has such weights, for ``evaluate.py``, ``infer.py`` and ``export.py``.  ``requests.py`` has what these three are
asked to do, and ``predicting.py`` what they share.  ``images`` reads and writes images.  ``runtimes.py`` runs exported
networks in a process without this package.  ``verification.py`` compares their outputs with the run's, ``exported.py``
loads them in place of a run, and ``network_input.py`` describes their input for ``predict.py``, the script of an
export.

Files: ``folder.py`` has the table of a run folder's files, and reads them; ``writer.py`` writes them and says whether
this process may.  ``records.py`` declares the records in JSON files, ``checkpoints.py`` names and opens checkpoints,
``provenance.py`` records the origin of a result, and ``compare.py`` compares run folders.
"""
