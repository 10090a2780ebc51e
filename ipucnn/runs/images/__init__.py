"""Images of a run: inputs of `evaluate` and `infer`, segmentation of whole images, and files written from images."""
