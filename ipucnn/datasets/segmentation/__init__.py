"""Images with masks: the data sets, the reading of masks, and the patches that networks see."""
