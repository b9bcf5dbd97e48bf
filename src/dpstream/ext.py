"""What authors of mechanisms, aggregates, sources and sinks import: one place, typed.

    mechanism   HistogramMechanism, SeriesMechanism, Spender, Release, storable, sensitivities
    aggregate   Sum, Avg, ..., and the Measure behind them
    source      Source, Batch, and a protocol for each further ability
    sink        Sink, and a protocol for each further ability
    tests       SourceSuite, SinkSuite, ...; for a mechanism the auditor's Target

The how-to guides build one of each. Modules of dpstream itself import from where a name lives.
"""

from dpstream.audit.mechanism_samplers import SequentialRuns as SequentialRuns
from dpstream.audit.targets import Pair as Pair
from dpstream.audit.targets import Target as Target
from dpstream.audit.targets import block as block
from dpstream.connectors.memory import TableSource as TableSource
from dpstream.connectors.server_base import RetryPolicy as RetryPolicy
from dpstream.connectors.server_base import ServerOptions as ServerOptions
from dpstream.connectors.testing import Abort as Abort
from dpstream.connectors.testing import Aborted as Aborted
from dpstream.connectors.testing import ListSink as ListSink
from dpstream.connectors.testing import ListSource as ListSource
from dpstream.connectors.testing import ServerSinkSuite as ServerSinkSuite
from dpstream.connectors.testing import ServerSourceSuite as ServerSourceSuite
from dpstream.connectors.testing import SinkSuite as SinkSuite
from dpstream.connectors.testing import SourceSuite as SourceSuite
from dpstream.connectors.testing import UpsertSinkSuite as UpsertSinkSuite
from dpstream.connectors.testing import check_sink as check_sink
from dpstream.connectors.testing import check_source as check_source
from dpstream.engines.clock import Clock as Clock
from dpstream.engines.query_run import Engine as Engine
from dpstream.evaluate.trials import trials as trials
from dpstream.mechanisms.base import Delayed as Delayed
from dpstream.mechanisms.base import HistogramMechanism as HistogramMechanism
from dpstream.mechanisms.base import Mechanism as Mechanism
from dpstream.mechanisms.base import SeriesMechanism as SeriesMechanism
from dpstream.mechanisms.base import Spender as Spender
from dpstream.mechanisms.base import whole as whole
from dpstream.privacy.amounts import Amount as Amount
from dpstream.privacy.amounts import exact as exact
from dpstream.privacy.amounts import gaussian_stddev as gaussian_stddev
from dpstream.privacy.amounts import laplace_stddev as laplace_stddev
from dpstream.privacy.amounts import positive as positive
from dpstream.privacy.ledger.charges import Cells as Cells
from dpstream.privacy.ledger.charges import Cover as Cover
from dpstream.privacy.ledger.charges import Interval as Interval
from dpstream.privacy.ledger.charges import Paid as Paid
from dpstream.privacy.ledger.charges import Terms as Terms
from dpstream.privacy.sensitivity import group_by_change as group_by_change
from dpstream.privacy.sensitivity import histogram_change as histogram_change
from dpstream.privacy.sensitivity import range_change as range_change
from dpstream.privacy.sensitivity import units_change as units_change
from dpstream.privacy.state.identity import Identified as Identified
from dpstream.privacy.state.serial import storable as storable
from dpstream.query.aggregates import Aggregate as Aggregate
from dpstream.query.aggregates import ApproxCountDistinct as ApproxCountDistinct
from dpstream.query.aggregates import Avg as Avg
from dpstream.query.aggregates import AvgOfValues as AvgOfValues
from dpstream.query.aggregates import Count as Count
from dpstream.query.aggregates import CountDistinct as CountDistinct
from dpstream.query.aggregates import CountUnits as CountUnits
from dpstream.query.aggregates import Measure as Measure
from dpstream.query.aggregates import Stddev as Stddev
from dpstream.query.aggregates import Sum as Sum
from dpstream.query.aggregates import Variance as Variance
from dpstream.query.noise_plan import plan_query as plan_query
from dpstream.query.quantiles import Histogram as Histogram
from dpstream.query.quantiles import Quantile as Quantile
from dpstream.query.row_spec import Finish as Finish
from dpstream.query.row_spec import Prepare as Prepare
from dpstream.query.second_moments import Correlation as Correlation
from dpstream.query.second_moments import Covariance as Covariance
from dpstream.query.second_moments import Slope as Slope
from dpstream.records import Batch as Batch
from dpstream.records import CheckedSink as CheckedSink
from dpstream.records import ChunkRanges as ChunkRanges
from dpstream.records import CommittingSource as CommittingSource
from dpstream.records import ConcurrentSink as ConcurrentSink
from dpstream.records import EmptyingSource as EmptyingSource
from dpstream.records import EndingSource as EndingSource
from dpstream.records import FencingSink as FencingSink
from dpstream.records import FinitePartitions as FinitePartitions
from dpstream.records import InferredTypes as InferredTypes
from dpstream.records import Integers as Integers
from dpstream.records import MeasuredSource as MeasuredSource
from dpstream.records import ParallelReads as ParallelReads
from dpstream.records import Position as Position
from dpstream.records import Reals as Reals
from dpstream.records import Rejected as Rejected
from dpstream.records import Release as Release
from dpstream.records import Sink as Sink
from dpstream.records import SizedPartitions as SizedPartitions
from dpstream.records import Source as Source
from dpstream.records import StampedPartitions as StampedPartitions
from dpstream.records import StartOffsets as StartOffsets
from dpstream.records import TwoPhaseSink as TwoPhaseSink
from dpstream.records import UpsertingSink as UpsertingSink
from dpstream.sql_compiler.expressions import known_functions as known_functions
