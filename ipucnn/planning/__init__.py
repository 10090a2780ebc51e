"""Planning: how to split a network into pipeline stages over IPUs, and what is predicted for the split."""
