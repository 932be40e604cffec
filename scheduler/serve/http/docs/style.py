"""How the page looks."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6675; --line: #dfe3e8; --ground: #fff; --side: #f6f7f9;
  --code: #eef1f4; --link: #0b5cad; --get: #1a7f4b; --post: #8a4b00; --delete: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a3b3; --line: #2d3540; --ground: #14181d;
  --side: #1a1f26; --code: #222933; --link: #7db7ff; --get: #58c98f; --post: #e3a857; --delete: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0; display: grid; grid-template-columns: 17rem minmax(0, 1fr); color: var(--ink);
  background: var(--ground); font: 15px/1.55 system-ui, sans-serif; }
nav { position: sticky; top: 0; height: 100vh; overflow-y: auto; padding: 1.5rem 1rem; background: var(--side);
  border-right: 1px solid var(--line); }
nav h1 { margin: 0 0 1rem .4rem; font-size: 1.25rem; }
nav h1 small { color: var(--soft); font-weight: normal; font-size: .8rem; }
nav a { display: flex; gap: .2rem; padding: .2rem .4rem; border-radius: 4px; color: inherit; font-size: .84rem;
  overflow-wrap: anywhere; }
nav a:hover { background: var(--code); text-decoration: none; }
main { max-width: 74rem; padding: 2rem 2.5rem 6rem; }
.lead { font-size: 1.2rem; margin: 0; }
section { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: .5rem; }
h2 { font-size: 1.25rem; margin: 1.2rem 0 .4rem; }
h2 code { background: none; padding: 0; font-size: 1.1rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; max-width: 46rem; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
code, pre { font: .86em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--code);
  border-radius: 4px; }
code { padding: .1em .3em; }
pre { padding: .8rem 1rem; overflow: auto; margin: .5rem 0; max-height: 22rem; }
table { border-collapse: collapse; width: 100%; margin: .4rem 0 1rem; font-size: .92em; }
th { text-align: left; color: var(--soft); font-weight: 600; font-size: .85em; }
th, td { padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
table.asked, table.answered { table-layout: fixed; min-width: 44rem; }
.asked th:nth-child(1) { width: 14.5rem; } .asked th:nth-child(2) { width: 7.5rem; }
.asked th:nth-child(3) { width: 7.5rem; } .asked th:nth-child(4) { width: 4.5rem; }
.answered th:nth-child(1) { width: 14.5rem; } .answered th:nth-child(2) { width: 14rem; }
td:first-child { white-space: nowrap; }
td em { color: var(--soft); font-size: .85em; }
summary { cursor: pointer; color: var(--soft); font-weight: 600; padding: .2rem 0; }
ul { margin: .3rem 0; padding-left: 1.2rem; }
b { display: inline-block; flex: none; min-width: 4.2em; font-size: .72rem; letter-spacing: .03em; }
b.get { color: var(--get); } b.post { color: var(--post); } b.delete { color: var(--delete); }
@media (max-width: 800px) { body { display: block; } nav { position: static; height: auto; }
  main { padding: 1rem; } table { display: block; overflow-x: auto; } }
@media print { nav { display: none; } body { display: block; } }
"""
