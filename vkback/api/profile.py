"""A profile of a model as Python shows it: as `vkback profile` prints it, and in a notebook as the page that its --html writes."""

from __future__ import annotations

import sys
from html import escape

from vkback.timing import profile_model

PLAIN = str.maketrans({"─": "-", "├": "|", "└": "`", "│": "|"})
"""The lines of tables and trees, for a stdout that lacks them."""


class Profile(profile_model.Profile):
    """Where the time of a prompt and of the tokens behind it goes. `print` shows its tables, a notebook its page; the fields have the
    numbers, kernel by kernel."""

    @classmethod
    def of(cls, found: profile_model.Profile) -> Profile:
        return cls(**vars(found))

    def __str__(self) -> str:
        from vkback.report.profile_text import report

        text = "\n".join(report(self))
        try:
            text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        except UnicodeEncodeError:  # print() would raise it, after minutes of measuring
            return text.translate(PLAIN).encode("ascii", "backslashreplace").decode()
        return text

    def __repr__(self) -> str:
        return f"<profile of {self.model} on {self.device}: {', '.join(phase.name for phase in self.phases)}; print() shows it>"

    def _repr_html_(self) -> str:
        """The page has styles and scripts for all of a document, so that it stands in a frame of its own."""
        from vkback.report.profile_page import page

        return f'<iframe srcdoc="{escape(page(self))}" width="100%" height="800" style="border: 0"></iframe>'
