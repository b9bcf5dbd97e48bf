"""SQL with a privacy clause, compiled to queries; the only importer of sqlglot."""

from dpstream.sql_compiler.compile_sql import (
    Compiled,
    compile_sql,
    sql,
    warn_of_budget,
    warn_of_remarks,
)
from dpstream.sql_compiler.user_queries import funnel, retention, sessions

__all__ = [
    "Compiled",
    "compile_sql",
    "funnel",
    "retention",
    "sessions",
    "sql",
    "warn_of_budget",
    "warn_of_remarks",
]
