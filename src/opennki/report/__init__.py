"""What people look at after a timing estimate: a self-contained HTML page, and a trace for Perfetto or chrome://tracing.

`page(timeline)` and `chrome_trace(timeline)` give text; docs/toolchain.md shows them.
"""

from opennki.report.page import page
from opennki.report.trace_events import chrome_trace

__all__ = ["chrome_trace", "page"]
