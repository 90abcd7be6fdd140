"""Make a synthetic table of labeled texts from a private one, and say what it cost."""
