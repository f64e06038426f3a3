"""The documentation site: Sphinx over Markdown (MyST). `make docs` writes it to build/site."""

project = "Tilewise"
author = "The Tilewise authors"
project_copyright = "2026, The Tilewise authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/*.md~"]
source_suffix = {".md": "markdown"}

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Blocks of C++ that end in a macro, and shell lines, are shown as they are.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings give shapes and dtypes
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "Tilewise"
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["site.css"]
highlight_language = "none"  # blocks without a language are drawings and shell lines


def _skip(_app, _what, name, member, skip, _options):
    """Leaves out fields of named tuples, which have no text of their own, and torch's methods."""
    is_field = (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
    return True if is_field or name == "extra_repr" else skip


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip)
