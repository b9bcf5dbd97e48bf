"""GROUP BY and SELECT: which columns are keys, aggregates, or computed from them.

Every aggregate is one whose change by one unit is bounded.
"""

from __future__ import annotations

from functools import reduce
from itertools import chain, combinations

from sqlglot import exp

from dpstream.query.grouping_sets import GROUPING_ID, MOST_SETS
from dpstream.sql_compiler.from_clause import substitute
from dpstream.sql_compiler.join_clause import unit_columns
from dpstream.sql_compiler.privacy_clause import is_word_auto
from dpstream.sql_compiler.statement import (
    AGGREGATES,
    BOUNDED_AGGREGATES,
    CELL_AGGREGATES,
    PAIR_AGGREGATES,
    RELEASE_COLUMNS,
    WINDOW_COLUMNS,
    Draft,
    Over,
    call_name,
    canonical,
    find_calls,
    present_args,
)

BOUNDS = "contribution_bounds_per_row"
"""The argument of an aggregate that clamps its values."""
GROUP_BOUNDS = "contribution_bounds_per_group"
"""The argument that clamps what all rows of a unit in a group make together."""
GROUPING = ("GROUPING", "GROUPING_ID")
"""Which keys the set of a published row leaves out."""
_PER_GROUP = ("COUNT", "COUNTIF", "SUM", "AVG")


def name_keys(draft: Draft) -> None:
    """Name the keys by their aliases; GROUP BY takes columns, expressions, aliases and numbers."""
    several = _grouped(draft)
    if len(several) == 1:
        _name_keys(draft, several[0])
        return
    group, windowed = draft.select.args["group"], []
    for nodes in several:
        known, draft.windowed = dict(draft.keys), False
        draft.keys.clear()
        _name_keys(draft, nodes, once=False)
        names = set(draft.keys)
        draft.keys = known | draft.keys
        windowed.append(draft.windowed)
        draft.sets.append(tuple(names))
    if any(windowed) and not all(windowed):
        raise draft.refusal(
            group,
            "a window belongs to every set of keys",
            "write GROUP BY window_start, ROLLUP (a, b)",
        )
    draft.sets = [tuple(name for name in draft.keys if name in names) for names in draft.sets]
    if len({*draft.sets}) < len(draft.sets):
        raise draft.refusal(group, "a set of keys is listed twice", "list each once")
    if draft.series:
        raise draft.refusal(
            group,
            "a time-series mechanism fills one histogram",
            "group by one set of keys, or publish to users (leave privacy_unit out)",
        )


def _name_keys(draft: Draft, nodes: list[exp.Expr], *, once: bool = True) -> None:
    """The keys of one set; `once`: none may be listed again."""
    for node in nodes:
        item = _selected_item(draft, node)
        if _is_window_column(draft, item):
            draft.windowed = True
            continue
        plain = item.unalias()
        for call in find_calls(plain, AGGREGATES):
            raise draft.refusal(
                call, "an aggregate cannot be a key", "group by columns and expressions of rows"
            )
        if plain.find(Over) is not None:
            raise draft.refusal(
                node,
                "a window function (OVER) looks at the rows of several units, and cannot be a key",
                "group by columns and expressions of rows",
            )
        if isinstance(plain, exp.Literal | exp.Null | exp.Boolean):
            raise draft.refusal(node, "a constant is no key", "group by columns")
        expression = substitute(draft, plain, draft.relation)
        own_name = plain.name if isinstance(plain, exp.Column) else canonical(plain)
        aliases = (each for each in draft.select.expressions if isinstance(each, exp.Alias))
        same = (each.alias for each in aliases if canonical(each.this) == canonical(plain))
        name = next(same, "") or own_name
        if name in draft.keys and (once or draft.keys[name] != expression):
            raise draft.refusal(node, f"the key {name} is listed twice", "list it once")
        draft.keys[name] = expression


def expand_sets(draft: Draft, group: exp.Expr) -> list[list[exp.Expr]]:
    """What each set of GROUP BY lists; there is one, but for ROLLUP and its like."""
    sets: list[list[exp.Expr]] = [[]]
    for node in group.expressions:
        inside = [
            list(each.expressions) if isinstance(each, exp.Tuple) else [each.unnest()]
            for each in node.expressions
        ]
        choices, sizes = [[node]], range(len(inside), -1, -1)
        if isinstance(node, exp.Rollup):
            choices = [[*chain(*inside[:size])] for size in sizes]
        elif isinstance(node, exp.Cube) and 1 << len(inside) <= MOST_SETS:
            choices = [[*chain(*some)] for size in sizes for some in combinations(inside, size)]
        elif isinstance(node, exp.GroupingSets):
            choices = inside
        sets = [[*before, *more] for before in sets for more in choices]
        if len(sets) > MOST_SETS or (choices == [[node]] and isinstance(node, exp.Cube)):
            raise draft.refusal(group, "there are too many sets of keys", "name fewer")
    return sets


def _grouped(draft: Draft) -> list[list[exp.Expr]]:
    """What GROUP BY lists; ALL stands for every column of SELECT that is no aggregate."""
    group = draft.select.args.get("group")
    if group is None:
        return [[]]
    if not group.args.get("all"):
        return expand_sets(draft, group)
    constants = exp.Literal | exp.Null | exp.Boolean
    listed = [
        item
        for item in draft.select.expressions
        if not any(find_calls(item, AGGREGATES))
        and not isinstance(item.unalias(), constants)
        and item.find(Over) is None
        and not any(find_calls(item, GROUPING))
    ]
    return [listed]


def grouping_call(draft: Draft, call: exp.Expr, keys: dict[str, str]) -> exp.Expr:
    """GROUPING(a) or GROUPING_ID(a, b) as an expression of the column `grouping_id`.

    `keys`: their names by what they are.
    """
    if not draft.sets:
        raise draft.refusal(
            call,
            f"{call_name(call)} tells several sets of keys apart, and there is one",
            "use it with ROLLUP, CUBE or GROUPING SETS",
        )
    number = exp.column(GROUPING_ID, quoted=True)
    order, two = list(draft.keys), exp.Literal.number(2)
    bits: list[exp.Expr] = []
    for argument in call.expressions or [exp.column(name, quoted=True) for name in order]:
        text = canonical(substitute(draft, argument, draft.relation))
        name = keys.get(text, argument.name if isinstance(argument, exp.Column) else "")
        if name not in order:
            raise draft.refusal(call, f"{text} is no key", f"name one of {', '.join(order)}")
        place = exp.Literal.number(1 << len(order) - 1 - order.index(name))
        shifted = exp.Anonymous(this="DIV", expressions=[number.copy(), place])
        bits.append(exp.Anonymous(this="MOD", expressions=[shifted, two.copy()]))

    def joined(before: exp.Expr, bit: exp.Expr) -> exp.Expr:
        twice = exp.Mul(this=before, expression=two.copy())
        return exp.Paren(this=exp.Add(this=twice, expression=bit))

    return reduce(joined, bits)


def _selected_item(draft: Draft, node: exp.Expr) -> exp.Expr:
    """The item of SELECT that an alias or a number in GROUP BY stands for."""
    if isinstance(node, exp.Literal) and not node.is_string:
        selected: exp.Expr = draft.select.expressions[selected_position(draft, node)]
        return selected
    if isinstance(node, exp.Column) and not node.args.get("table"):
        for item in draft.select.expressions:
            if isinstance(item, exp.Alias) and item.alias == node.name:
                return item
    return node


def selected_position(draft: Draft, node: exp.Expr) -> int:
    """The index of the column of SELECT that a number stands for, which counts from 1."""
    number = int(node.name) if node.name.isdigit() else 0
    if not 1 <= number <= len(draft.select.expressions):
        raise draft.refusal(node, f"there is no column {node.name}", "count from 1")
    return number - 1


def _is_window_column(draft: Draft, node: exp.Expr) -> bool:
    """Is this window_start or window_end, of a query that has windows?"""
    plain = node.unalias()
    if not isinstance(plain, exp.Column) or plain.name not in WINDOW_COLUMNS:
        return False
    if draft.relation.window is None:
        raise draft.refusal(
            node,
            f"there is no {plain.name}: FROM has no window",
            "write FROM TUMBLE(table, DESCRIPTOR(time), INTERVAL '1' DAY)",
        )
    if isinstance(node, exp.Alias) and node.alias != plain.name:
        raise draft.refusal(
            node, f"{plain.name} keeps its name in what is published", "leave the alias out"
        )
    return True


def refuse_unit_as_key(draft: Draft) -> None:
    """Nothing made of the unit is a key: each group would be one unit.

    Where all groups are public, what is computed of it may be one: arms of a test, MOD(user, 2).
    """
    unit = draft.parameters["privacy_unit_column"]
    for item in draft.select.expressions:
        if isinstance(item, exp.Column) and item.name == unit and unit not in draft.keys:
            raise draft.refusal(
                item,
                f"{unit} is the privacy unit: it is never published",
                "leave it out; COUNT(DISTINCT unit) counts units",
            )
    units = unit_columns(draft)
    public = "public_groups" in draft.parameters and draft.relation.unit is None
    for name, expression in draft.keys.items():
        if public and not isinstance(expression.unnest(), exp.Column):
            continue
        for column in expression.find_all(exp.Column):
            if column.name in units:
                raise draft.refusal(
                    expression,
                    f"the key {name} is made of the privacy unit {unit}: groups would show units",
                    "group by other columns; COUNT(DISTINCT unit) counts units; arms of a test "
                    "take public groups: MOD(user_id, 2) AS arm, public_groups = (0, 1)",
                )


def refuse_unit_in_expressions(draft: Draft) -> None:
    """Rows of a subquery per unit have no column of the unit: units are counted, no more."""
    relation, unit = draft.relation, draft.parameters["privacy_unit_column"]
    if relation.unit is None:
        return
    where = draft.select.args.get("where")
    read = [] if where is None else [where]
    for call in draft.aggregates.values():
        argument = call.expressions[0]
        distinct = isinstance(argument, exp.Distinct) or call_name(call) == "APPROX_COUNT_DISTINCT"
        if not distinct or distinct_values(draft, call) is not None:
            read.append(argument)
    written = [(c, substitute(draft, c, relation)) for e in read for c in e.find_all(exp.Column)]
    for column, made in [*written, *((each, each) for each in relation.where)]:
        found = next((part for part in made.find_all(exp.Column) if part.name == unit), None)
        if found is not None:
            raise draft.refusal(
                column if isinstance(column, exp.Column) else found,
                f"{unit} is the privacy unit: no expression outside of a subquery per unit has it",
                "leave it out, or filter rows in WHERE of the subquery; COUNT(*) counts its rows, "
                f"COUNT(DISTINCT {unit}) units",
            )


def require_grouped_windows(draft: Draft) -> None:
    """With TUMBLE each window is a group of its own."""
    if draft.relation.window is not None and not draft.windowed:
        raise draft.refusal(
            draft.relation.window,
            "windows are not grouped by",
            "add window_start to GROUP BY, or read the table without TUMBLE",
        )


def name_aggregates(draft: Draft) -> None:
    """Name the aggregates by their aliases; any other column is a key, or computed from both."""
    keys = {canonical(expression): name for name, expression in draft.keys.items()}
    computed: list[exp.Expr] = []
    for item in draft.select.expressions:
        plain = item.unalias()
        if _is_window_column(draft, item):
            if not draft.windowed:
                raise _raw_column(draft, item)
            _output(draft, item, plain.name)
        elif isinstance(plain, exp.Column) and plain.name in draft.labels:
            if item.alias_or_name != plain.name:
                reason = f"{plain.name} keeps its name in what is published"
                raise draft.refusal(item, reason, "leave the alias out")
            _output(draft, item, plain.name)
        elif call_name(plain) in AGGREGATES:
            name = item.alias if isinstance(item, exp.Alias) else _default_name(draft, plain)
            if name in draft.keys:
                raise draft.refusal(item, f"two columns are named {name}", "name one with AS")
            _output(draft, item, name)
            draft.aggregates[name] = plain
        elif plain.find(Over) is not None:
            name = _computed_name(draft, item, keys)
            _output(draft, item, name)
            draft.ranked[name] = plain
        else:
            key = keys.get(canonical(substitute(draft, plain, draft.relation)))
            _output(draft, item, key or _computed_name(draft, item, keys))
            computed += [] if key else [item]
    for item in computed:
        ends = ("_stddev", "_low", "_high") if draft.parameters.get("confidence") else ("_stddev",)
        alike = {f"{item.alias}{end}" for end in ends} | {item.alias.removesuffix(e) for e in ends}
        alike -= {item.alias}
        if alike & {*draft.outputs}:
            raise draft.refusal(item, f"{item.alias} would be taken for an error bar", "rename it")
        draft.computed[item.alias] = _published_expression(draft, item.this, keys)
    alone = draft.keys and "public_groups" not in draft.parameters and not draft.series
    if not draft.aggregates and not alone:
        raise draft.refusal(
            draft.clause, "nothing is aggregated", "add COUNT(*), or another aggregate"
        )


def _output(draft: Draft, item: exp.Expr, name: str) -> None:
    if name in draft.outputs:
        raise draft.refusal(item, f"two columns are named {name}", "name one with AS")
    draft.outputs.append(name)


def _computed_name(draft: Draft, item: exp.Expr, keys: dict[str, str]) -> str:
    """The name of a column that is neither a key nor an aggregate, but may be made of them."""
    plain = item.unalias()
    if isinstance(plain, exp.Column):
        raise _raw_column(draft, item)
    if not isinstance(item, exp.Alias):
        for column in [] if any(find_calls(plain, AGGREGATES)) else plain.find_all(exp.Column):
            if canonical(substitute(draft, column, draft.relation)) not in keys:
                raise _raw_column(draft, item)
        raise draft.refusal(
            item, "a computed column needs a name", f"write {canonical(plain)} AS x"
        )
    name = str(item.alias)
    taken = {f"{each}_stddev" for each in [*draft.outputs, *draft.aggregates]}
    if name in {*draft.keys, *draft.labels, *WINDOW_COLUMNS, *RELEASE_COLUMNS, "held"} | taken:
        raise draft.refusal(item, f"two columns are named {name}", "name one with another AS")
    return name


def _published_expression(draft: Draft, node: exp.Expr, keys: dict[str, str]) -> exp.Expr:
    """An expression in terms of published columns: keys, windows and (noisy) aggregates."""

    def publish(part: exp.Expr) -> exp.Expr:
        if call_name(part) in GROUPING:
            return grouping_call(draft, part, keys)
        if call_name(part) in AGGREGATES:
            return exp.column(_aggregate_name(draft, part), quoted=True)
        if isinstance(part, exp.Identifier | exp.Literal):
            return part
        if draft.windowed and isinstance(part, exp.Column) and part.name in WINDOW_COLUMNS:
            return exp.column(part.name, quoted=True)
        if part.find(exp.Anonymous, exp.Column) and not any(find_calls(part, AGGREGATES)):
            name = keys.get(canonical(substitute(draft, part, draft.relation)))
            if name is not None:
                return exp.column(name, quoted=True)
        if isinstance(part, exp.Column):
            raise _raw_column(draft, part)
        return part

    return node.transform(publish)


def _aggregate_name(draft: Draft, call: exp.Expr) -> str:
    """The name under which an aggregate is published; one that is not shown has one too."""
    text = canonical(call)
    for name, known in draft.aggregates.items():
        if canonical(known) == text:
            return name
    name = text
    while name in {*draft.outputs, *draft.keys}:
        name += "'"
    draft.aggregates[name] = call
    draft.hidden.add(name)
    return name


def _raw_column(draft: Draft, item: exp.Expr) -> Exception:
    shown = canonical(item.unalias())
    return draft.refusal(
        item,
        f"{shown} is neither grouped by nor aggregated: it would publish values of rows",
        f"add GROUP BY {shown}, or aggregate it",
    )


def _default_name(draft: Draft, call: exp.Expr) -> str:
    """count, units, sum_x, avg_x, variance_x."""
    argument = call.expressions[0] if call.expressions else None
    if isinstance(argument, exp.Star):
        return "count"
    if isinstance(argument, exp.Distinct):
        values = distinct_values(draft, call)
        if values is None:
            return "units"
        if isinstance(argument.expressions[0], exp.Column):
            return f"distinct_{argument.expressions[0].name}"
    if call_name(call) in PAIR_AGGREGATES:
        both = [each for each in call.expressions if isinstance(each, exp.Column)]
        if len(both) == 2:
            return "_".join([call_name(call).lower(), *(each.name for each in both)])
    elif isinstance(argument, exp.Column):
        return f"{call_name(call).lower()}_{argument.name}"
    raise draft.refusal(call, "the aggregate has no name", f"write {canonical(call)} AS name")


def require_bounded_aggregates(draft: Draft) -> None:
    """Every aggregate is one whose change by one unit is known."""
    for call in draft.aggregates.values():
        function = call_name(call)
        arguments = [each for each in call.expressions if not isinstance(each, exp.Kwarg)]
        if function in CELL_AGGREGATES:
            _require_cells(draft, call, arguments)
            continue
        if function in PAIR_AGGREGATES:
            _require_pairs(draft, call, arguments)
            continue
        if len(arguments) != 1:
            raise draft.refusal(call, f"{function} takes one column", f"write {function}(column)")
        (argument,), named = arguments, named_arguments(call)
        known = {BOUNDS, "quantum"} if function in BOUNDED_AGGREGATES else set()
        if function == "APPROX_COUNT_DISTINCT":
            known = {"one_in"}
        if function in _PER_GROUP and not draft.series:
            known |= {GROUP_BOUNDS}
        for name in named:
            if name not in known:
                raise draft.refusal(
                    call,
                    f"{function} has no argument {name}",
                    _other_argument(name, function, argument, named[name])
                    or (f"known are {', '.join(sorted(known))}" if known else "leave it out"),
                )
        bounds = named.get(BOUNDS) or named.get(GROUP_BOUNDS)
        bounded = isinstance(bounds, exp.Tuple) and len(bounds.expressions) == 2
        bounded = bounded or is_word_auto(bounds)
        if BOUNDS in named and GROUP_BOUNDS in named:
            raise draft.refusal(
                call, f"{function} has bounds per row and per group", "give one of them"
            )
        if isinstance(argument, exp.Distinct) or function == "APPROX_COUNT_DISTINCT":
            _require_values(draft, call)
        elif bounds and not bounded:
            raise draft.refusal(
                bounds,
                "bounds are two numbers, or AUTO",
                "write (0, 600): the least and the most",
            )
        elif function in BOUNDED_AGGREGATES and not bounds and draft.unbounded:
            call.append("expressions", _placeholder())
        elif function in BOUNDED_AGGREGATES and not bounded:
            raise draft.refusal(
                call,
                f"{function} has no bounds: one row could change it by any amount",
                f"write {function}({canonical(argument)}, {BOUNDS} => (0, 600)), with "
                "bounds that do not come from the data",
            )
        elif isinstance(argument, exp.Star) and function != "COUNT":
            raise draft.refusal(call, f"{function}(*) has no meaning", "name a column")


def _require_cells(draft: Draft, call: exp.Expr, arguments: list[exp.Expr]) -> None:
    """A quantile has bounds or edges, a histogram edges; both are public."""
    function, named = call_name(call), named_arguments(call)
    example = CELL_AGGREGATES[function]
    wanted = 1 + (function in ("PERCENTILE_CONT", "APPROX_QUANTILES", "HISTOGRAM"))
    if len(arguments) != wanted or isinstance(arguments[0], exp.Star | exp.Distinct):
        takes = "a column" if wanted == 1 else "a column and a constant"
        raise draft.refusal(call, f"{function} takes {takes}", f"write {example}")
    known = set() if function == "HISTOGRAM" else {BOUNDS, "leaves", "edges", "mechanism"}
    for name in named.keys() - known:
        told = f"known are {', '.join(sorted(known))}" if known else f"write {example}"
        raise draft.refusal(call, f"{function} has no argument {name}", told)
    bounds = named.get(BOUNDS)
    bounded = isinstance(bounds, exp.Tuple) and len(bounds.expressions) == 2
    if known and not bounded and (bounds or not isinstance(named.get("edges"), exp.Array)):
        raise draft.refusal(
            call,
            f"{function} has no bounds: the range of its values must be public",
            f"write {example}, with bounds that do not come from the data",
        )


def _require_pairs(draft: Draft, call: exp.Expr, arguments: list[exp.Expr]) -> None:
    """Two columns, and bounds of each."""
    function, named = call_name(call), named_arguments(call)
    example = f"{function}(y, x, {BOUNDS} => ((0, 600), (0, 10)))"
    if len(arguments) != 2 or any(isinstance(each, exp.Star | exp.Distinct) for each in arguments):
        raise draft.refusal(call, f"{function} takes two columns", f"write {example}")
    for name in named.keys() - {BOUNDS}:
        raise draft.refusal(call, f"{function} has no argument {name}", f"write {example}")
    bounds = named.get(BOUNDS)
    pairs = bounds.expressions if isinstance(bounds, exp.Tuple) else []
    if len(pairs) != 2 or any(
        not isinstance(each, exp.Tuple) or len(each.expressions) != 2 for each in pairs
    ):
        problem = "bounds are two numbers for each column" if bounds else "no bounds"
        raise draft.refusal(
            bounds or call,
            problem if bounds else f"{function} has {problem}: a row could change it by any amount",
            f"write {example}, with bounds that do not come from the data",
        )


def _other_argument(name: str, function: str, argument: exp.Expr, value: exp.Expr) -> str | None:
    """What to write in place of BigQuery's bounds of all rows of a unit in a group."""
    if name != GROUP_BOUNDS:
        return None
    if function in BOUNDED_AGGREGATES:
        return (
            f"write {function}({canonical(argument)}, {BOUNDS} => {canonical(value)}); of a unit's "
            "rows in a group max_rows_per_group count"
        )
    return f"write {function}({canonical(argument)}), and max_rows_per_group in OPTIONS"


def _placeholder() -> exp.Expr:
    """Clamps of a SUM whose clamps are still to be chosen."""
    ends = [exp.Literal.number(0), exp.Literal.number(2)]
    return exp.Kwarg(this=exp.Var(this=BOUNDS), expression=exp.Tuple(expressions=ends))


def distinct_values(draft: Draft, call: exp.Expr) -> exp.Expr | None:
    """The expression whose distinct values are counted; None: the privacy unit."""
    distinct = call.expressions[0]
    if call_name(call) == "APPROX_COUNT_DISTINCT" and not isinstance(distinct, exp.Star):
        distinct = exp.Distinct(expressions=[distinct])
    column = distinct.expressions[0] if len(distinct.expressions) == 1 else None
    counts = call_name(call) in ("COUNT", "APPROX_COUNT_DISTINCT")
    if not counts or column is None or present_args(distinct) - {"expressions"}:
        raise draft.refusal(
            call, "DISTINCT goes with COUNT and one column", "write COUNT(DISTINCT column)"
        )
    counted = substitute(draft, column, draft.relation)
    unit = draft.parameters["privacy_unit_column"]
    is_unit = isinstance(counted, exp.Column) and counted.name == unit
    return None if is_unit else counted


def _require_values(draft: Draft, call: exp.Expr) -> None:
    """Of other values than the unit itself it must be known how many of a unit count."""
    if named_arguments(call).keys() - {"one_in"}:
        raise draft.refusal(
            call,
            "COUNT(DISTINCT ...) takes no bounds of rows",
            "add max_values_per_group = 4 to OPTIONS: of a unit's values in a group so many count",
        )
    values = distinct_values(draft, call)
    if values is None:
        return
    if values.find(exp.Column) is None:
        raise draft.refusal(call, "a constant has one value", "name a column")
    if draft.series:
        raise draft.refusal(
            call,
            "a time-series mechanism counts units, and no other values",
            "write COUNT(*), or leave privacy_unit out",
        )
    if "max_values_per_group" not in draft.parameters:
        unit = draft.parameters["privacy_unit_column"]
        raise draft.refusal(
            call,
            "max_values_per_group is missing: how many values of a unit count in a group",
            "add max_values_per_group = 4 to OPTIONS (the noise grows with it), or write "
            f"COUNT(DISTINCT {unit}), or group by the column",
        )


def named_arguments(call: exp.Expr) -> dict[str, exp.Expr]:
    """Name => value arguments of a call."""
    return {
        each.this.name.lower(): each.expression
        for each in call.expressions
        if isinstance(each, exp.Kwarg)
    }


def require_group_bound(draft: Draft) -> None:
    """How many groups a unit may reach: one, or what the query chooses, or refused."""
    if draft.series or "max_groups_contributed" in draft.parameters:
        return
    if draft.windowed and draft.parameters.get("privacy_unit_period", "forever") != "forever":
        return
    if (draft.keys or draft.windowed) and not draft.unbounded:
        if draft.parameters.get("delta") is not None:
            return  # units for ever have a usual number; `Query` says where there is none
        raise draft.refusal(
            draft.clause,
            "max_groups_contributed is missing: in how many groups (key and window) a unit counts",
            "add max_groups_contributed = 8 to OPTIONS; the noise grows with its square root",
        )
    draft.parameters["max_groups_contributed"] = 1
