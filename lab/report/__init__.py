"""From rows to tables, figures and one HTML page."""
