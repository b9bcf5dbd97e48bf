"""How the report looks, in light and in dark, and what it may load: nothing."""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --line: #dfe3ea;
  --back: #f6f7f9; --card: #fff; --good: #17703a; --bad: #b3261e; --open: #8a5a00;
  --bar: #9db7e8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #313947;
  --back: #12161d; --card: #1a202a; --good: #5fd08a; --bad: #ff8a80; --open: #f2c14e;
  --bar: #3f5f9c; } }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1rem 4rem; background: var(--back);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1, h2 { line-height: 1.2; margin: 0 0 .4rem; } p { margin: .3rem 0 1rem; color: var(--soft); }
a { color: inherit; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 1.3rem 1.5rem; margin: 1.5rem 0; }
img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left; }
th { color: var(--soft); font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.reached, .holds, .caught { color: var(--good); } .missed, .MISSED, .REJECTED { color: var(--bad); }
.not-measured { color: var(--open); }
.track { position: relative; width: 12rem; height: .8rem; background: var(--back);
  border-radius: 3px; overflow: hidden; }
.track i { position: absolute; inset: 0 auto 0 0; background: var(--bar); }
.track b { position: absolute; left: 50%; top: 0; bottom: 0; width: 2px; background: var(--ink); }
summary { cursor: pointer; color: var(--soft); }
"""
