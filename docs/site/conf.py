"""Sphinx's configuration; assemble.py writes the sources that it reads."""

import pybackend

project = "tfdist"
author = "The tfdist Authors"
release = pybackend.__version__
copyright = author

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# `barrier_train` in a docstring is a link where it names something, and code where it does not.
default_role = "py:obj"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Signatures have one argument a line where they are long.
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# Outputs and prompts are not copied.
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "pydata_sphinx_theme"
html_title = f"tfdist {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {
    "logo": {"text": "tfdist"},
    "navbar_align": "left",
    "navigation_depth": 3,
    "show_nav_level": 1,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "search_bar_text": "Search R, Python and guides",
}
html_sidebars = {"index": []}


def _find_type(app, env, node, contnode):
    """Link the classes of results, which docstrings name without their module."""
    if node.get("refdomain") != "py":
        return None
    target = f"pybackend.types.{node['reftarget']}"
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode)


def setup(app):
    app.connect("missing-reference", _find_type)
