"""Reads pretrained models from folders of Hugging Face's form, and writes such folders."""
