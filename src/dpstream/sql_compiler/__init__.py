"""SQL with a privacy clause, compiled to queries; the only importer of sqlglot."""

from dpstream.sql_compiler.compile_sql import Compiled, compile_sql, sql, warn_of_remarks

__all__ = ["Compiled", "compile_sql", "sql", "warn_of_remarks"]
