"""HTML pages that need no network: the template that all share, charts drawn by plotly, and how a page is written."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.offline
import yaml


@dataclass(frozen=True)
class Chart:
    """One chart: its words, and its traces in plotly's form; ``meta`` of a trace holds its x for each choice of axis."""

    title: str
    note: str
    traces: list[dict]
    layout: dict


def write_page(out: Path, template: str, *, axes: Mapping[str, tuple[str, str]], sections: list[dict], **values: Any) -> Path:
    """Renders a template over ``report/page.html.jinja`` and writes it whole or not at all.

    Args:
        out: The file.
        template: Path of the template in the package.
        axes: Choices of the charts' x: by the name that a trace's ``meta`` has it under, the button's words and the axis title.
        sections: What is charted: each a dict with the ``Chart``s under ``charts``, in the order of the page's ``.plot``.
        values: What else the template names.

    Returns:
        ``out``.
    """
    page = (
        _environment()
        .get_template(template)
        .render(
            axes=axes,
            axis_titles={name: title for name, (_, title) in axes.items()},
            sections=sections,
            plotly_js=plotly.offline.get_plotlyjs(),
            **values,
        )
    )
    partial = out.with_name(out.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    return out


def _environment() -> jinja2.Environment:
    """Texts are untrusted, so everything is escaped unless marked otherwise."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: resources.files("pods_jax").joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: "" if value is None else f"{value:.4g}"
    environment.filters["yaml"] = lambda value: yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return environment
