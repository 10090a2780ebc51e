"""Shared by all tests: a quiet TensorFlow, few threads, and a deterministic Hypothesis profile."""

import os

from hypothesis import HealthCheck, settings

from ipucnn.sessions.host.environment import set_variables

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

set_variables()  # the same kernels as in a run, whichever test imports TensorFlow first

settings.register_profile(
    "ipucnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ipucnn")
