"""Images of a run: what `evaluate` and `infer` read, how a segmentation network sees them, what is written of them."""
