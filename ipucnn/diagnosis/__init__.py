"""What is on this machine, what each command would run on, and what to do about what is missing.

Nothing here imports TensorFlow; ``probe`` lets a process of its own do so.
"""
