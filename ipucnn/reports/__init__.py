"""What commands show: tables, progress, pages and pictures, a module for each command; nothing is computed here.

``console.py`` knows the streams, tables and bars, ``units.py`` writes every number, ``sheets.py`` draws sheets of
pictures, and ``plan_figures.py`` the SVG of a plan's page, whose text and style are the template ``plan.html.j2``.
"""
