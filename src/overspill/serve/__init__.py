"""Serving: prompts in, tokens out, with experts on any tier."""
