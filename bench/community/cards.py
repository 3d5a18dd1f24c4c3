"""Check the files of this folder and print the table of cards; exit code 1 where one is wrong.

python bench/community/cards.py [FILE...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from vkback.report import tables
from vkback.report.community import CARDS_LEFT, cards, read
from vkback.report.result_table import ReportError


def main(names: list[str]) -> int:
    files = [Path(name) for name in names] or sorted(Path(__file__).parent.glob("*.json"))
    wrong, right = [], []
    for file in files:
        try:
            read(file)
            right.append(file)
        except ReportError as e:
            wrong.append(str(e))
    print("\n".join(tables.markdown(cards(right), CARDS_LEFT)))
    print("\n".join(wrong), file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
