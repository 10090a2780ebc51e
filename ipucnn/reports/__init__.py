"""What commands show: tables, progress, pages and pictures, a module for each command; nothing is computed here.

``console.py`` knows the streams, tables and bars, ``units.py`` writes every number, ``sheets.py`` draws sheets of
pictures.  ``plan_text.py`` has what a plan says, for the terminal and for its page, the template ``plan.html.j2`` with
the SVG of ``plan_figures.py``.
"""
