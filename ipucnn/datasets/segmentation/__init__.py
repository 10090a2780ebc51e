"""Images with masks: the sets, what a mask is, and the tiles that a network sees of them."""
