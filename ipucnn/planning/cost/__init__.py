"""Predicts what layers, stages and programs cost on IPUs, in time and memory, from the layer graph.

``products.py`` partitions a product over the tiles and holds the fitted constants, ``layer_times.py`` adds everything
else, ``memory.py`` sums up an IPU's memory, and ``schedule.py`` determines what runs in each tick, for throughput and
timelines.
"""
