"""One case or more for every mechanism, each small and with every branch that it can take."""

import dpstream as dps

BINS = 3
STEPS = 64  # BLT's parameters for 64 steps are in the shipped table

_W = {"epsilon": 1, "window": 5}
_SERIES = {"epsilon": 1, "lo": 0, "hi": 20}
_LATE = _SERIES | {"delay": 4}
_COUNTER = {"rho": "1/2", "steps": STEPS}

# By name, as `dpstream mechanisms` lists them; what stands after "/" is a variant.
CASES = {
    "uniform": lambda m: m.Uniform(**_W),
    "sample": lambda m: m.Sample(**_W),
    "budget_distribution": lambda m: m.BudgetDistribution(**_W),
    "budget_distribution/groups": lambda m: m.BudgetDistribution(**_W, groups=2),
    "budget_absorption": lambda m: m.BudgetAbsorption(**_W),
    "budget_absorption/groups": lambda m: m.BudgetAbsorption(**_W, groups=2),
    "spas": lambda m: m.Spas(**_W, warm_up=5),
    "pacer": lambda m: m.Pacer(**_W),
    "spas/theta": lambda m: m.Spas(
        **_W, warm_up=5, theta="1/3", update="decay", decay_base=3, testing_share="1/3"
    ),
    "fast_w": lambda m: m.FastW(**_W),
    "rescue_dp": lambda m: m.RescueDp(**_W),
    "dsat": lambda m: m.Dsat(**_W),
    "dsft": lambda m: m.Dsft(**_W),
    "pegasus_w": lambda m: m.PegasusW(**_W),
    "adapub": lambda m: m.AdaPub(**_W, pivots=2),
    "naive": lambda m: m.Naive(**_SERIES),
    "pegasus": lambda m: m.Pegasus(**_SERIES),
    "pegasus_delay": lambda m: m.PegasusDelay(**_LATE),
    "contin_group": lambda m: m.ContinGroup(**_LATE, threshold=4),
    "discontin_group": lambda m: m.DiscontinGroup(**_LATE, threshold=4),
    "comp_order": lambda m: m.CompOrder(**_LATE),
    "buc_order": lambda m: m.BucOrder(**_LATE, bucket=4),
    "sensitivity_truncation": lambda m: m.SensitivityTruncation(
        **_LATE, options=(("threshold", 4),), every=2
    ),
    "block_smoother": lambda m: m.BlockSmoother(**_LATE),
    "dpi": lambda m: m.Dpi(
        epsilon=1, rows_per_user=1, dummy_rows=20, pool_size=60, allocation="sparse",
    ),
    "dpi/adaptive": lambda m: m.Dpi(
        epsilon=1000, rows_per_user=1, dummy_rows=2, pool_size=60, gap=2,
    ),
    "dpi/histogram": lambda m: m.Dpi(
        epsilon=100, rows_per_user=1, gap=2, publish="histogram",
    ),
    "dpi/ranges": lambda m: m.Dpi(
        epsilon=1, rows_per_user=1, dummy_rows=20, pool_size=60,
        allocation="ranges", series="telescoping", queries=(3,),
    ),
    "naive_counter": lambda m: m.NaiveCounter(**_COUNTER),
    "tree": lambda m: m.TreeCounter(**_COUNTER),
    "honaker": lambda m: m.HonakerCounter(**_COUNTER),
    "smooth_binary": lambda m: m.SmoothBinaryCounter(**_COUNTER),
    "toeplitz": lambda m: m.ToeplitzCounter(**_COUNTER),
    "blt": lambda m: m.BltCounter(**_COUNTER),
    "blt/epsilon": lambda m: m.BltCounter(epsilon=1, delta=1e-6, steps=STEPS, buffers=2),
    "unbounded_counter": lambda m: m.UnboundedCounter(rho="1/2"),
}  # fmt: skip

ONE_BIN = {
    "naive", "pegasus", "pegasus_delay", "contin_group", "discontin_group", "comp_order",
    "buc_order", "sensitivity_truncation", "block_smoother",
}  # fmt: skip


def mechanism(name):
    """The mechanism of a case."""
    return CASES[name](dps.mechanisms)


def stream(name):
    """Counts from 0 to 20 with quiet and busy stretches: steps x bins, as nested lists."""
    bins = 1 if name.partition("/")[0] in ONE_BIN else BINS
    return [[_count(step, bin_) for bin_ in range(bins)] for step in range(STEPS)]


def _count(step, bin_):
    busy = step // 7 % 3 == 2
    return (12 if busy else 1) + (37 * step * step + 11 * step + 53 * bin_ + 7) % (9 if busy else 5)
