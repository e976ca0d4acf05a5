"""Several host processes that act as one island."""
