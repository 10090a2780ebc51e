"""Output of the commands: tables, progress, pages and pictures, a module for each command.  It computes no results.

``console.py`` has the streams, tables and bars, ``units.py`` formats all numbers, and ``sheets.py`` draws sheets of
pictures.  ``plan_text.py`` has the texts of a plan for the terminal and for its page, which is the template
``plan.html.j2`` with the SVG of ``plan_figures.py``.
"""
