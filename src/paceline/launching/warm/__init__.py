"""Imports torch before ranks are forked, and hides it until the script asks for it."""
