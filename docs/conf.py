"""How Sphinx builds the documentation site of these pages: `make docs`.  The pages stay plain Markdown for GitHub."""

import re

project = "ipucnn"
author = "The ipucnn authors"
copyright = "the ipucnn authors, Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "generate.py"]
# Headings get the names that GitHub gives them, so that a link to a section works in both places.
myst_heading_anchors = 5
# What stands in `console` blocks is output, of which Pygments knows no grammar.
highlight_language = "text"
# Quotes and dots become typographic ones, but two hyphens stay what they are: outside of code, too, they begin options.
smartquotes_action = "qe"
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "ipucnn"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_copy_source = False
# The index would be of functions and classes, of which these pages describe none.
html_use_index = False
html_show_sphinx = False
# Furo takes the fonts of the reader's system; nothing that a page loads comes from another host (a test looks).


def _name_what_is_outside(app, page, source):
    """Files of the repository that are not part of the site are named, not linked."""
    up = re.escape("../" * (page.count("/") + 1))
    source[0] = re.sub(rf"\[([^\]]+)\]\({up}([^)#]+)[^)]*\)", r"\1 (`\2` in the repository)", source[0])


def setup(app):
    app.connect("source-read", _name_what_is_outside)
