"""One page about trainings: read their folders, draw the figures as SVG, colour what a drafter gets right.

1. `gather` reads what a run has left; `texts` is what a sample with accepted runs is, `samples` makes
   some.
2. `series` turns lines of figures into curves of bounded length; `axes` and `charts` draw them.
3. `markup` escapes everything by construction; `figure` joins a chart, its legend and its table.
4. `curves`, `tables` and `settings` are the sections; `page` puts them together, `run` writes the file.
"""
