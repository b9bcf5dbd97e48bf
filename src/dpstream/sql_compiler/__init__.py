"""SQL with a privacy clause, compiled to queries; the only importer of sqlglot."""

from dpstream.sql_compiler.compile_sql import Compiled, compile_sql, sql

__all__ = ["Compiled", "compile_sql", "sql"]
