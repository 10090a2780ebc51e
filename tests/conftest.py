"""Shared by all tests: a quiet TensorFlow, few threads, and a deterministic Hypothesis profile."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ipucnn", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ipucnn")
