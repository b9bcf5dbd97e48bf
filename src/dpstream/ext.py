"""What authors of mechanisms, aggregates, sources and sinks import: one place, typed.

    mechanism   HistogramMechanism, SeriesMechanism, Spender, Release, storable, sensitivities
    aggregate   Sum, Avg, ..., and the Measure behind them
    source      Source, Batch, and a protocol for each further ability
    sink        Sink, and a protocol for each further ability
    tests       SourceSuite, SinkSuite, ...; for a mechanism the auditor's Target

The how-to guides build one of each. Modules of dpstream itself import from where a name lives.
"""

from dpstream.audit.mechanism_samplers import SequentialRuns
from dpstream.audit.neighbours import Pair, block
from dpstream.audit.targets import Target
from dpstream.connectors.memory import TableSource
from dpstream.connectors.server_base import RetryPolicy, ServerOptions
from dpstream.connectors.testing import (
    Abort,
    Aborted,
    ListSink,
    ListSource,
    ServerSinkSuite,
    ServerSourceSuite,
    SinkSuite,
    SourceSuite,
    check_sink,
    check_source,
)
from dpstream.engines.clock import Clock
from dpstream.engines.query_run import Engine
from dpstream.evaluate.trials import trials
from dpstream.mechanisms.base import (
    Delayed,
    HistogramMechanism,
    Mechanism,
    SeriesMechanism,
    Spender,
    whole,
)
from dpstream.privacy.amounts import Amount, exact, gaussian_stddev, laplace_stddev, positive
from dpstream.privacy.ledger.charges import Cells, Cover, Interval, Paid, Terms
from dpstream.privacy.sensitivity import (
    group_by_change,
    histogram_change,
    range_change,
    units_change,
)
from dpstream.privacy.state.identity import Identified
from dpstream.privacy.state.serial import storable
from dpstream.query.aggregates import (
    Aggregate,
    Avg,
    Count,
    CountUnits,
    Measure,
    Stddev,
    Sum,
    Variance,
)
from dpstream.query.noise_plan import plan_query
from dpstream.query.row_spec import Finish, Prepare
from dpstream.records import (
    Batch,
    ChunkRanges,
    CommittingSource,
    ConcurrentSink,
    EndingSource,
    FencingSink,
    FinitePartitions,
    InferredTypes,
    Integers,
    Position,
    Reals,
    Rejected,
    Release,
    Sink,
    Source,
    StartOffsets,
    TwoPhaseSink,
)
from dpstream.sql_compiler.expressions import known_functions

__all__ = [
    "Abort",
    "Aborted",
    "Aggregate",
    "Amount",
    "Avg",
    "Batch",
    "Cells",
    "ChunkRanges",
    "Clock",
    "CommittingSource",
    "ConcurrentSink",
    "Count",
    "CountUnits",
    "Cover",
    "Delayed",
    "EndingSource",
    "Engine",
    "FencingSink",
    "Finish",
    "FinitePartitions",
    "HistogramMechanism",
    "Identified",
    "InferredTypes",
    "Integers",
    "Interval",
    "ListSink",
    "ListSource",
    "Measure",
    "Mechanism",
    "Paid",
    "Pair",
    "Position",
    "Prepare",
    "Reals",
    "Rejected",
    "Release",
    "RetryPolicy",
    "SequentialRuns",
    "SeriesMechanism",
    "ServerOptions",
    "ServerSinkSuite",
    "ServerSourceSuite",
    "Sink",
    "SinkSuite",
    "Source",
    "SourceSuite",
    "Spender",
    "StartOffsets",
    "Stddev",
    "Sum",
    "TableSource",
    "Target",
    "Terms",
    "TwoPhaseSink",
    "Variance",
    "block",
    "check_sink",
    "check_source",
    "exact",
    "gaussian_stddev",
    "group_by_change",
    "histogram_change",
    "known_functions",
    "laplace_stddev",
    "plan_query",
    "positive",
    "range_change",
    "storable",
    "trials",
    "units_change",
    "whole",
]
