"""The search for splits: exact for given settings, then over settings, with a proof or the reason why nothing fits."""
