"""Style sheet of a plan's page: light and dark, no external resources.  No ``<`` and ``&``: the page is XML too."""

from ipucnn.reports.markup import Markup

__all__ = ["STYLE"]

# Colours of marks have a contrast of 3 and more against the page, text on and beside them of 4.5 and more.
STYLE = Markup("""
:root { color-scheme: light dark;
  --page: #ffffff; --panel: #f5f7fa; --line: #d5dbe3; --text: #1a1f26; --muted: #525c69; --on-bar: #ffffff;
  --good: #1a7337; --doubt: #8a5a00; --bad: #b3261e;
  --forward: #2b6cb0; --recompute: #6b8dbb; --backward: #b1502a; --transfer: #c9d1db;
  --s0: #2b6cb0; --s1: #b1502a; --s2: #2a7f4f; --s3: #8746a6; --s4: #8a6500; --s5: #0f7c86; --s6: #b03a68;
  --s7: #5c6670;
  --weights: #33589c; --accumulators: #2b8fb3; --optimizer: #2a7f4f; --stash: #c2643c; --live: #a03a78;
  --temporaries: #a67c00; --code: #6d7782; }
@media (prefers-color-scheme: dark) { :root {
  --page: #10151c; --panel: #1a212b; --line: #35404e; --text: #e7ebf0; --muted: #a3aebb; --on-bar: #0c1117;
  --good: #6fd08c; --doubt: #f0bf5b; --bad: #ff8f86;
  --forward: #6ba8ea; --recompute: #4f79b0; --backward: #ee9a72; --transfer: #3c4756;
  --s0: #6ba8ea; --s1: #ee9a72; --s2: #6cc791; --s3: #c795e6; --s4: #d8b24a; --s5: #55c2cc; --s6: #ee8bb2;
  --s7: #a6b0bb;
  --weights: #7ca0e0; --accumulators: #5cc0e2; --optimizer: #6cc791; --stash: #ee9a72; --live: #e08bc0;
  --temporaries: #dab44c; --code: #a6b0bb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 72rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 52rem; }
.muted, figcaption { color: var(--muted); font-size: .9rem; }
.name, code, pre { overflow-wrap: anywhere; }
code, pre { font: .875rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .75rem 1rem;
  margin: .5rem 0; white-space: pre-wrap; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 17rem), 1fr));
  gap: .75rem; margin: 1.2rem 0; }
.cards div { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
dl { margin: 0; } dt { color: var(--muted); font-size: .85rem; }
dd { margin: 0; } .value { font-size: 1.35rem; font-weight: 600; line-height: 1.3; overflow-wrap: anywhere; }
.fits { color: var(--good); } .uncertain { color: var(--doubt); } .does-not-fit { color: var(--bad); }
.notice { border-left: .3rem solid var(--doubt); background: var(--panel); padding: .5rem 1rem; margin: 1rem 0; }
.notice.does-not-fit { border-color: var(--bad); color: inherit; }
figure { margin: .5rem 0; }
.scroll { overflow-x: auto; }
.figure { display: block; width: 100%; min-width: 56rem; height: auto; }
.figure.half { min-width: 24rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; margin: .4rem 0;
  font-size: .9rem; }
.legend svg { width: .95rem; height: .95rem; vertical-align: -.12rem; margin-right: .4rem; }
table { border-collapse: collapse; width: 100%; min-width: 42rem; font-size: .9rem; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--muted); font-weight: 600; vertical-align: bottom; }
td code { overflow-wrap: break-word; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.chosen { background: var(--panel); font-weight: 600; }
svg text { font-family: inherit; }
.label { fill: var(--text); font-size: 12px; } .small { font-size: 11px; fill: var(--muted); }
.start { text-anchor: start; } .middle { text-anchor: middle; } .end { text-anchor: end; } .strong { font-weight: 600; }
.halo { paint-order: stroke; stroke: var(--page); stroke-width: 4px; stroke-linejoin: round; }
.on-bar, .pass-micro-batch text { fill: var(--on-bar); font-size: 11px; text-anchor: middle; pointer-events: none; }
.grid { stroke: var(--line); stroke-width: 1; } .axis { stroke: var(--muted); stroke-width: 1; }
.bound { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; } .bound.whole { stroke-dasharray: none; }
.bracket { fill: none; stroke: var(--muted); stroke-width: 1.2; }
.ipu rect { stroke: var(--page); stroke-width: .8; }
.cat-weights { fill: var(--weights); } .cat-accumulators { fill: var(--accumulators); }
.cat-optimizer_state { fill: var(--optimizer); } .cat-stash { fill: var(--stash); }
.cat-live_activations { fill: var(--live); } .cat-temporaries { fill: var(--temporaries); }
.cat-code { fill: var(--code); }
.pass-forward { fill: var(--forward); } .pass-recompute { fill: var(--recompute); }
.pass-backward { fill: var(--backward); }
.pass-transfer { fill: var(--transfer); } .first { stroke: var(--text); stroke-width: 1.2; }
.outline { fill: none; stroke: var(--text); stroke-width: 1.6; }
.omitted { fill: var(--page); stroke: var(--muted); stroke-width: 1; stroke-dasharray: 2 3; }
.cut { stroke: var(--text); stroke-width: 1; fill: none; stroke-dasharray: 3 2; }
.stage-0 { fill: var(--s0); } .stage-1 { fill: var(--s1); } .stage-2 { fill: var(--s2); } .stage-3 { fill: var(--s3); }
.stage-4 { fill: var(--s4); } .stage-5 { fill: var(--s5); } .stage-6 { fill: var(--s6); }
.stage-7 { fill: var(--s7); }
.point { stroke-width: 2; } .point.fits { fill: var(--forward); stroke: var(--page); stroke-width: 1; }
.point.uncertain { fill: var(--page); stroke: var(--doubt); }
.point.does-not-fit { fill: var(--page); stroke: var(--bad); }
.best { fill: none; stroke: var(--text); stroke-width: 2; }
""")
