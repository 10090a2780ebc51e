"""What layers, stages and programs cost on IPUs: time and memory, predicted from the layer graph."""
