"""What training computes, as arithmetic and formulas that both sessions share.

``batching.py`` and ``program.py`` are the batch arithmetic and the Program; then schedules, optimizers, losses,
metrics, the sums of an evaluation, and the portable checkpoint format.
"""
