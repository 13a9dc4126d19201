"""What all tests share."""

import os

from hypothesis import settings

# Figures are drawn to files only, in this process and in those that tests start.
os.environ.setdefault("MPLBACKEND", "Agg")

# Experiments stay in the process of their test; those that are about several processes start them on their own.
os.environ["LOKY_MAX_CPU_COUNT"] = "1"

# The same examples on every run, and no limit per example: a busy machine is no failure.
settings.register_profile("smartlib", deadline=None, derandomize=True)
settings.load_profile("smartlib")
