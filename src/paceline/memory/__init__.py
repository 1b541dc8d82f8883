"""What fills a rank's memory: the limits, the composition by kind and module, and what would have fitted."""
