"""The OpenAI-compatible HTTP server of `overspill serve`."""
