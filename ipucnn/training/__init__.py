"""The arithmetic and formulas of training that both sessions share.

``batching.py`` and ``program.py`` have the batch arithmetic and the Program; the other modules have schedules,
optimizers and their settings, losses, the scores of validations and evaluations, and the portable checkpoint
format.
"""
