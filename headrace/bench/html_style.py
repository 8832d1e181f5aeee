"""Style of the HTML report: light and dark by the reader's system; eight colours for lines."""

from __future__ import annotations

_COLOURS = {
    "light": ("#2563c9", "#c2571a", "#16805a", "#8a3fb5", "#b3890b", "#c22f55", "#3d7f96", "#6b6f3a"),
    "dark": ("#6ea3ff", "#f09a5e", "#4fc796", "#c590ee", "#e0bb4b", "#f0809c", "#7cc4dc", "#b9bd78"),
}


def _variables(theme: str) -> str:
    return " ".join(f"--c{number}: {colour};" for number, colour in enumerate(_COLOURS[theme]))


_PAGE = """
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.05rem; margin-top: 2rem; }
.charts { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; }
svg { width: 100%; height: auto; }
text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.title { font-weight: 600; font-size: 14px; }
.tick, .label { fill: var(--soft); }
.grid { stroke: var(--rule); }
.axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; }
.dot { stroke: var(--paper); stroke-width: 1.5; }
.legend { margin: .2rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; color: var(--soft);
  font-size: 13px; }
.key { display: inline-block; width: 12px; height: 3px; margin: 0 .4rem .25rem 0; vertical-align: middle; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
"""

STYLE = "\n".join(
    [
        ":root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --soft: #5b6675; --rule: #dde2e9;",
        f"  {_variables('light')} }}",
        "@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e4e9f0; --soft: #98a4b3;",
        f"  --rule: #2c3542; {_variables('dark')} }} }}",
        _PAGE.strip(),
        *(f".line.c{number} {{ stroke: var(--c{number}); }}" for number in range(8)),
        *(f".dot.c{number} {{ fill: var(--c{number}); }}" for number in range(8)),
        *(f".key.c{number} {{ background: var(--c{number}); }}" for number in range(8)),
    ]
)
