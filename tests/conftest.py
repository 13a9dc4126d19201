"""What all tests share."""

import os

from hypothesis import settings

# Figures are drawn to files only, in this process and in those that tests start.
os.environ.setdefault("MPLBACKEND", "Agg")

# The same examples on every run, and no limit per example: a busy machine is no failure.
settings.register_profile("smartlib", deadline=None, derandomize=True)
settings.load_profile("smartlib")
