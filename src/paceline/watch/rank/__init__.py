"""Runs inside a rank: records its collectives, samples its main thread and reports to the launcher."""
