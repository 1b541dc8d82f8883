"""Cuts any model into stages for `pp`: ranks run the user's own forward, each computing its part."""
