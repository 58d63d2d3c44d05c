"""Reading pictures back: the values that a curve in an SVG shows."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np

from fedxl.reporting.charts import chart as charts


def parse(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def drawn(root: ET.Element, kind: str) -> list[ET.Element]:
    """Elements of a class, in the order in which they are drawn."""
    return [each for each in root.iter() if kind in each.get("class", "").split()]


def points(path: ET.Element) -> np.ndarray:
    numbers = re.findall(r"-?[\d.]+", path.get("d", "") or path.get("points", ""))
    return np.array(numbers, float).reshape(-1, 2)


def values(places: np.ndarray, x: tuple[float, float], y: tuple[float, float], bottom: float) -> np.ndarray:
    """From places in a chart back to values, given what its axes span."""
    across = (places[:, 0] - charts.LEFT) / (charts.WIDTH - charts.RIGHT - charts.LEFT)
    up = (bottom - places[:, 1]) / (bottom - charts.TOP)
    return np.stack([x[0] + across * (x[1] - x[0]), y[0] + up * (y[1] - y[0])], 1)
