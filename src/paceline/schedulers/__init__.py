"""Renders jobs for SLURM and Kubernetes as plain text, and submits them; without torch."""
