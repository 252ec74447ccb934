"""Settings every test shares."""

from __future__ import annotations

from hypothesis import settings

# Machines are slow at times: a deadline would test the machine. Examples are the same in every run.
settings.register_profile("perdure", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("perdure")
