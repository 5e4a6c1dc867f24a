"""One page for a run or a comparison: every picture and its numbers, in one file that needs no network.

Charts are drawn twice, for a light and a dark page; the browser shows the one that fits. Strips of glimpses
are drawn by the page itself, so that they wrap on a narrow screen and keep their text legible.
"""

from stam.show.report.comparison import comparison_report
from stam.show.report.run import run_report

__all__ = ["comparison_report", "run_report"]
