"""What layers, stages and programs cost on IPUs: time and memory, predicted from the layer graph.

``products.py`` partitions a product over the tiles and has the fitted constants, ``layer_times.py`` adds everything
else, ``memory.py`` fills an IPU, and ``schedule.py`` says what runs in which tick, for throughput and timelines.
"""
