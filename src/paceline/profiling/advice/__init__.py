"""The settings that would make a step shorter, each with the time that it would save: one rule per file."""
