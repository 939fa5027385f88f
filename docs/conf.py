"""How Sphinx builds the site: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from extension import stubs  # noqa: E402

stubs.install()

import horo_lite  # noqa: E402

project = "horo_lite"
version = release = horo_lite.__version__
copyright = "the authors of horo_lite"
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_design",
    "extension.reference",
    "extension.plot",
]
exclude_patterns = ["snippets", "extension"]
nitpicky = True
# Types in signatures are links where they are public; that they exist, mypy knows.
nitpick_ignore_regex = [(r"py:class", r".*")]
suppress_warnings = ["ref.python"]  # "Handle" in a signature is the module's own, and another's too
default_role = "code"

source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "horo_lite"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
# Pages without others below them need no list of these.
SINGLE = "install coming-from from-horovod frameworks environment security changelog"
html_sidebars: dict[str, list[str]] = {page: [] for page in SINGLE.split()}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_prev_next": False,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "header_links_before_dropdown": 6,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
copybutton_prompt_text = "$ "
