"""What vkback reports while it works. The library prints nothing: lines go to Python's `logging`, and who wants them configures it."""

from __future__ import annotations

import logging

log = logging.getLogger("vkback")
"""Warnings for what changes results or speed, infos for what a user may like to know."""

log.addHandler(logging.NullHandler())  # else Python prints warnings on stderr where nothing is configured

TO_MEND = {"to_mend": True}
"""extra= of a warning whose cause the user can remove. Commands begin its line with `warning:`."""
