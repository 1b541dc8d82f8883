"""Watches a job's ranks from outside, and reports why they hang, mismatch collectives or are slow."""
