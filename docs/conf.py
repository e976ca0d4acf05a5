"""The documentation as a site: `bash launch/docs.sh`.

The source folder is the checkout, so that links between pages, notebooks and code are
the same here and in the repository. What can be told from the code is written anew at
each build into `reference/`, and a page for each section of the index into `guide/`.
"""

import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import site_pages  # noqa: E402
import site_sections  # noqa: E402

project = "diloco_jax"
author = copyright = "The diloco_jax authors"
version = release = metadata.version("diloco-jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.mermaid",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "docs/**.md",
    "guide/*.md",
    "reference/*.md",
    "launch/**.md",
    "notebooks/*.ipynb",
]
exclude_patterns = ["**/.*", "site", "runs"]
suppress_warnings = ["myst.header"]  # A page may begin at any level.

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4
nb_execution_mode = "off"
default_role = "code"
highlight_language = "bash"  # Blocks without a language are commands.
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "pydata_sphinx_theme"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_search_scorer = str(HERE / "search_scorer.js")
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 8,
}


def setup(app):
    """Write the pages that are made, and divide the index."""
    site_pages.write_reference(HERE.parent / "reference")
    site_sections.write_sections(HERE / "index.md", HERE.parent / "guide")
    app.connect("source-read", site_sections.divide_index)
    # After the theme has added what makes the navigation.
    app.connect("html-page-context", site_sections.name_toggles, priority=900)
    app.connect("autodoc-process-signature", site_pages.short_signature)
    # Before napoleon reads them.
    app.connect("autodoc-process-docstring", site_pages.plain_blocks, priority=400)
