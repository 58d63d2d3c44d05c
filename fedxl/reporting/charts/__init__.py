"""Pictures of a report as inline SVG: what holds them together is in `chart.py`."""
