"""A package that is run with `-m trainer.main`."""

VERSION = "1.2"
