"""Tests of the launchers as members of a job."""
