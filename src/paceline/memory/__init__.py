"""Explains what fills a rank's memory: limits, composition by kind and module, and what would have fitted."""
