"""For tests of sources, sinks and whatever lies between them, of this package or of your own.

`ListSource` and `ListSink` are scripts and memories. `check_source` and `check_sink` look at one
over given rows, in a line. `SourceSuite`, `ServerSourceSuite`,
`SinkSuite` and `ServerSinkSuite` are what every source and sink must do: subclass one in a test
file, say how the thing is opened and filled, and pytest runs it.
"""

from dpstream.connectors.testing.contract import (
    Abort,
    Aborted,
    ListSink,
    ListSource,
    check_sink,
    check_source,
)
from dpstream.connectors.testing.suites import (
    ServerSinkSuite,
    ServerSourceSuite,
    SinkSuite,
    SourceSuite,
)

__all__ = [
    "Abort",
    "Aborted",
    "ListSink",
    "ListSource",
    "ServerSinkSuite",
    "ServerSourceSuite",
    "SinkSuite",
    "SourceSuite",
    "check_sink",
    "check_source",
]
