"""The registered networks: each module has the records of a family, as ``MODELS``, beside their builders."""
