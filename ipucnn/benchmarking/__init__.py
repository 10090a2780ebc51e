"""Measuring throughput and time: what ``ipucnn benchmark`` does, without its tables."""
